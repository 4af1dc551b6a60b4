"""Recordings of runs, the comparison of two of them, and the first cause of their difference."""
