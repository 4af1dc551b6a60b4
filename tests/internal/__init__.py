"""What every package uses: containers, events, locks, versions of PyTorch, displays."""
