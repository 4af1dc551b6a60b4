"""The effect of a policy on one operation, or on each module of a model."""
