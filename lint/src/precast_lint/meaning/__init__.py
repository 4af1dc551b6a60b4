"""The meaning of code to PyTorch: regions, tensors, devices and dtypes, version guards, custom functions."""
