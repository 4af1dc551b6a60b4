"""Policies attached to models, and held weights."""
