"""Edits of a text that keep its formatting: arguments, lines, imports."""
