"""Adapters for other libraries, one file for each; none is loaded before a program imports it."""
