"""The gradient scaler: its decisions, its gradients, its states, and what it says."""
