"""Weights in 16 bits: cast once, kept while they stay the same, checked for changes."""
