"""Policies: tables, files, patterns, the presets."""
