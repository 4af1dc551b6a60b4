"""Selection of rules: settings, the oldest PyTorch, and the rules that can concern a file."""
