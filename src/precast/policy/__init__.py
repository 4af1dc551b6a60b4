"""A policy as data: which operation runs in which precision, in tables, files and rules for modules."""
