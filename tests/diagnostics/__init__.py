"""Traces, monitors, reports, explanations."""
