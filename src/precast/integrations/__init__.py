"""Adapters for other libraries, one file for each, loaded when a program imports it."""
