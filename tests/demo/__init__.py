"""The demos: what they train, measure and show."""
