"""Regions, and custom functions."""
