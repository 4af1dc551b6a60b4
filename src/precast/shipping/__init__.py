"""A policy built into what is served: models whose weights are stored as they are used, and programs of graph nodes."""
