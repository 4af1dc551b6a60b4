"""`precast run`: a script as it is, watched from start to end. Start reading in `session.py`."""
