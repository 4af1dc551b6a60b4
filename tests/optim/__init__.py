"""Weights stored in bfloat16, and the compiled steps of their optimizers."""
