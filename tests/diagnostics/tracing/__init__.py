"""Traces: what they count, find and explain."""
