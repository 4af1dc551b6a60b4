"""The weight cache, and what makes a copy stale."""
