"""`precast.install()`, which replaces PyTorch's own names, and the integrations that need no other library."""
