"""The engine of this process, and for the slower one the reason and the remedy."""

from __future__ import annotations

import os
from dataclasses import dataclass

from precast.engine import registration
from precast.weights.native import library

__all__ = ["EngineReport", "engine_here"]


@dataclass(frozen=True)
class EngineReport:
    """The engine that runs."""

    name: str
    """"native" or "reference"."""
    reason: str = ""
    """The reason for the reference engine; empty for the native one."""
    remedy: str = ""
    """The way to get the native engine; empty if it runs, or if there is none."""


def engine_here() -> EngineReport:
    """Return the engine of this process."""
    name = registration.engine()
    if name == "native":
        return EngineReport(name)
    native = library.load()
    if isinstance(native, library.Unavailable):
        return EngineReport("reference", native.reason, native.remedy)
    variable = os.environ.get("PRECAST_ENGINE")
    if variable:
        return EngineReport("reference", f"PRECAST_ENGINE is {variable!r}", "unset PRECAST_ENGINE")
    return EngineReport("reference", "the program has chosen it")
