"""A run over files: which, on all cores, from the cache, and what is reported of each."""
