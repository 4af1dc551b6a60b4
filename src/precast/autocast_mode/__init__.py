"""Regions: autocast as a context manager and decorator, and custom functions that keep its precision."""
