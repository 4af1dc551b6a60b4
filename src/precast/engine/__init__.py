"""The kernels at PyTorch's autocast keys, and the policies that each thread has in force."""
