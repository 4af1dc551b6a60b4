"""Random programs for autocast: what they are made of, how they run, and how two runs are compared."""
