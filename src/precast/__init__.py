"""Automatic mixed precision for PyTorch that you can read, trust and steer."""
