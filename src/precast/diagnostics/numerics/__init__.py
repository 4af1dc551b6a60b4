"""Numeric health. Start with `monitor.py`: hooks, then `running.py`, `record.py`, and plain data from `samples.py`."""
