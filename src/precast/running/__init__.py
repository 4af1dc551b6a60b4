"""`precast run`: run a program unchanged, and watch it from start to end. Start reading in `session.py`."""
