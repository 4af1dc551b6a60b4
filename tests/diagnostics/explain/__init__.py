"""`precast explain`: what a policy does to a model and to an operation."""
