"""The checker and fixer."""
