"""PyTorch's own names of automatic mixed precision, implemented by precast."""
