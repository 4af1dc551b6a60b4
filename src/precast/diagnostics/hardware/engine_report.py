"""The engine of this process; for the slower one the reason, the remedy, and its cost on this machine.

Invariant: a figure is there only where both engines could be measured, in turns, in this process.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

import torch
from torch.nn import functional as F

from precast.autocast_mode.region import autocast
from precast.diagnostics.hardware.machine import interleaved_seconds
from precast.engine import registration
from precast.engine.native import library

__all__ = ["Cost", "EngineReport", "engine_here"]

_CALLS: Final = 500  # of one run: some milliseconds
_ROUNDS: Final = 10


@dataclass(frozen=True)
class Cost:
    """What one `F.linear` of 8x8 with weight and bias takes in a region, in seconds; the best of several runs."""

    reference: float
    native: float


@dataclass(frozen=True)
class EngineReport:
    """The engine that runs.

    Attributes:
        name: "native" or "reference".
        reason: why it is the reference; empty where it is not.
        remedy: what to do about it; empty where it is the native engine, or nothing can be done.
        cost: what the reference costs here; None where the native engine runs, or cannot be had to be measured.
    """

    name: str
    reason: str = ""
    remedy: str = ""
    cost: Cost | None = None


def engine_here(*, measure: bool = True) -> EngineReport:
    """Return the engine of this process.

    With `measure`, the cost of the reference engine is measured where the native one is available, too.
    """
    name = registration.engine()
    if name == "native":
        return EngineReport(name)
    found = library.load()
    if isinstance(found, library.Unavailable):
        return EngineReport("reference", found.reason, found.remedy)
    asked = os.environ.get("PRECAST_ENGINE")
    reason = f"PRECAST_ENGINE is {asked!r}" if asked else "the program has chosen it"
    remedy = "unset PRECAST_ENGINE" if asked else ""
    return EngineReport("reference", reason, remedy, _cost() if measure else None)


def _cost() -> Cost:
    tensors = torch.ones(8, 8), torch.ones(8, 8, requires_grad=True), torch.ones(8)

    def run(engine: str) -> None:
        with registration.use_engine(engine), autocast("cpu", dtype=torch.bfloat16):
            for _ in range(_CALLS):
                F.linear(*tensors)

    runs = (lambda: run("reference")), (lambda: run("native"))
    reference, native = interleaved_seconds(runs, torch.device("cpu"), _ROUNDS)
    return Cost(min(reference) / _CALLS, min(native) / _CALLS)
