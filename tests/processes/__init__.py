"""Programs of several processes, which torchrun starts."""
