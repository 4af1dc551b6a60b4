"""Names that move: every use of one in a file, and the fix that changes them together."""
