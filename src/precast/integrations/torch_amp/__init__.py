"""PyTorch's own names of automatic mixed precision, served by precast."""
