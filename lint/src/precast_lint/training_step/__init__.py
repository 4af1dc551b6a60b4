"""The order of a training step: what a function does with scalers and optimizers on each of its paths."""
