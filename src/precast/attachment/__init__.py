"""A policy attached to a model: rules for its modules, and weights that are held between regions."""
