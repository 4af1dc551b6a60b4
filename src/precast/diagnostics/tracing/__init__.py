"""Traces: the dtype and rule of each operation, the cost of casts, and advice. Start reading at `tracer.py`."""
