"""Policies: tables, files, patterns of names, and the presets."""
