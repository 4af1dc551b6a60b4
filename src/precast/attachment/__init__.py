"""Policies attached to models: rules for modules, and weights held between regions."""
