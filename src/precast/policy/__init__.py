"""Policies: tables, files and rules for modules that decide which operation runs in which precision."""
