"""Weights in 16 and 8 bits: cast once, kept while they stay the same, checked for changes."""
