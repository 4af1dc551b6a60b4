"""Numeric health of a model. Start reading at `monitoring.py`, then `model_watcher.py` and `record.py`."""
