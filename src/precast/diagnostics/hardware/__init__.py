"""Measurements of a machine: the speed of each dtype and of the engine."""
