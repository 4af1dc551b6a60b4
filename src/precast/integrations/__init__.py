"""Doors to other libraries, one file each; none is loaded until it is imported by name."""
