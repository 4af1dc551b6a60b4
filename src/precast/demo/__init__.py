"""Reference programs, trained in float32 and in mixed precision and shown side by side.

Start with `steps.py`: it holds the two training steps, and it is the file to copy from.
"""
