"""Helpers for all packages: files, locks, events, versions, containers, and the display of results."""
