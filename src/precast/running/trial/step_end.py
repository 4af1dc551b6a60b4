"""The exception that ends a trial between two steps.

Invariant: nothing here imports torch.
"""

__all__ = ["TrialEnd"]


class TrialEnd(BaseException):
    """The trial has ended. Not an `Exception`, so that `except Exception` of the program does not catch it."""
