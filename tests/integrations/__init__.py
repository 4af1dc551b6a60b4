"""Other libraries, and PyTorch's own names."""
