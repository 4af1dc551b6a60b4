"""Regions, the decorator, and custom autograd functions."""
