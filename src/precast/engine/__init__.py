"""Carries out a policy at PyTorch's autocast keys: what each thread has in force, and the kernels."""
