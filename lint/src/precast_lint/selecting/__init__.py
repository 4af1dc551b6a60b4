"""What a run is asked for: settings, the oldest PyTorch, and the rules that a file can concern."""
