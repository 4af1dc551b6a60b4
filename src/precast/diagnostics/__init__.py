"""Observation of programs and machines: traces, monitors, explanations, measurements, and the report of a run."""
