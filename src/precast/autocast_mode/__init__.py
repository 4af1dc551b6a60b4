"""Regions: autocast as context manager and decorator, and custom functions that keep its precision."""
