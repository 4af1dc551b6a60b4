"""Adapters for other libraries, one file for each; none is loaded before a program imports it."""

from __future__ import annotations

from precast._internal.missing import missing_extra
from precast.errors import MissingExtraError

__all__ = ["missing"]


def missing(package: str, extra: str) -> MissingExtraError:
    """The error for a library that is not installed."""
    return missing_extra(f"precast.integrations.{extra}", package, extra)
