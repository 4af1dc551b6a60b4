"""The monitor: the numbers that it counts, and the places that it names."""
