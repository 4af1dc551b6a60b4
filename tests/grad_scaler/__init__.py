"""The gradient scaler."""
