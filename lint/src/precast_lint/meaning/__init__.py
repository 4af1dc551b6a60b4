"""What code means to PyTorch: regions, tensors, devices and dtypes, version guards, custom functions."""
