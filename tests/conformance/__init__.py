"""precast against PyTorch, in the same process: what runs under torch.autocast runs the same on precast."""
