"""The versions of PyTorch that there are, from the first one with autocast on.

precast's own range ends where this one does. Neither imports the other for one number, so a test compares the two.
"""

from __future__ import annotations

__all__ = ["MINORS", "NEWEST"]

NEWEST = (2, 15)
MINORS = (
    *(f"1.{minor}" for minor in range(6, 14)),
    *(f"{NEWEST[0]}.{minor}" for minor in range(NEWEST[1] + 1)),
)
