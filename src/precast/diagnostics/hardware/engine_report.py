"""The engine of this process; for the slower one the reason, the remedy, and its cost on this machine.

Invariant: the cost is reported only if both engines were measured, in turns, in this process.
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
from precast.weights.native import library

__all__ = ["EngineCost", "EngineReport", "engine_here"]

_CALLS: Final = 500  # of one run: some milliseconds
_ROUNDS: Final = 10


@dataclass(frozen=True)
class EngineCost:
    """The time of one `F.linear` of 8x8 with weight and bias in a region, in seconds; the best of several runs."""

    reference: float
    native: float


@dataclass(frozen=True)
class EngineReport:
    """The engine that runs.

    Attributes:
        name: "native" or "reference".
        reason: the reason for the reference engine; empty for the native one.
        remedy: the way to get the native engine; empty if it runs, or if there is none.
        cost: the cost of the reference engine; None if the native engine runs, or is not available to be measured.
    """

    name: str
    reason: str = ""
    remedy: str = ""
    cost: EngineCost | None = None


def engine_here(*, measure: bool = True) -> EngineReport:
    """Return the engine of this process.

    With `measure`, the cost of the reference engine is measured where the native one is available, too.
    """
    name = registration.engine()
    if name == "native":
        return EngineReport(name)
    native = library.load()
    if isinstance(native, library.Unavailable):
        return EngineReport("reference", native.reason, native.remedy)
    variable = os.environ.get("PRECAST_ENGINE")
    reason = f"PRECAST_ENGINE is {variable!r}" if variable else "the program has chosen it"
    remedy = "unset PRECAST_ENGINE" if variable else ""
    return EngineReport("reference", reason, remedy, _cost() if measure else None)


def _cost() -> EngineCost:
    tensors = torch.ones(8, 8), torch.ones(8, 8, requires_grad=True), torch.ones(8)

    def run(engine: str) -> None:
        with registration.use_engine(engine), autocast("cpu", dtype=torch.bfloat16):
            for _ in range(_CALLS):
                F.linear(*tensors)

    runs = (lambda: run("reference")), (lambda: run("native"))
    reference, native = interleaved_seconds(runs, torch.device("cpu"), _ROUNDS)
    return EngineCost(min(reference) / _CALLS, min(native) / _CALLS)
