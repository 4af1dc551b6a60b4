"""A run over files: the search for them, the check on all cores, and the report of each file."""
