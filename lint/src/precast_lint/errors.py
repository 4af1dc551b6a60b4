"""The one error that the checker raises on purpose, beside `ValueError` for what it was asked wrongly."""

from __future__ import annotations

__all__ = ["CheckError"]


class CheckError(RuntimeError):
    """A rule failed on a file: a defect of precast-lint, not of the file."""
