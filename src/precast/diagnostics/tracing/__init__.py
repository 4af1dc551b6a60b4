"""What ran in which dtype and why, what the casts cost, and what to change; start reading at `tracer.py`."""
