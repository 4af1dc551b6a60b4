"""The kernels at the autocast keys."""
