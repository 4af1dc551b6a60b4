"""One file as it was read: its text, its tree, and what its names and values stand for."""
