"""Numeric health of a model.

Start with `monitoring.py`, then read `model_hooks.py`, `running_step.py`, `record.py`, and `samples.py` for plain data.
"""
