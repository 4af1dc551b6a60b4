"""All scenarios: importing this fills the table."""

from __future__ import annotations

from typing import Final

from tests.attack import (
    attach,
    installed,
    policies,
    programs,
    regions,
    scaler,
    threads,
    watching,
    weights,
)
from tests.attack.scenarios import TABLE, Scenario

__all__ = ["OPEN", "PARTS", "TABLE"]

PARTS = (regions, weights, attach, threads, scaler, policies, installed, programs, watching)
"""Every file with scenarios."""

_OPEN = (
    "a GRU under a trace in inference",
    "a failing operation runs once",
    "a failing write happens once",
    "a foreach operation on .data, a frozen weight, in inference mode",
    "a foreach operation on .data, a frozen weight, under no_grad",
    "a foreach operation on .data, a weight, in inference mode",
    "a write through .data, a frozen weight, in inference mode",
    "a write through .data, a frozen weight, under no_grad",
    "a write through .data, a weight, in inference mode",
    "a write through NumPy, a frozen weight, in inference mode",
    "a write through NumPy, a frozen weight, under no_grad",
    "a write through NumPy, a weight, in inference mode",
    "a write through a view of .data, a frozen weight, in inference mode",
    "a write through a view of .data, a frozen weight, under no_grad",
    "a write through a view of .data, a weight, in inference mode",
    "a write through the storage, a frozen weight, in inference mode",
    "a write through the storage, a frozen weight, under no_grad",
    "a write through the storage, a weight, in inference mode",
    "an LSTM under a trace in inference",
    "attention under a monitor in inference",
    "attention under a trace in inference",
    "casts of a GRU",
    "casts of attention",
    "conversion that swaps",
    "names that trainers read",
    "no gradients at all",
    "order of hooks",
    "patches of others",
    "scalers from before",
    "scalers made before",
    "swap after a region",
    "tensors of graph trees",
    "the end of a process after threads used a region",
    "words of warnings",
)

OPEN: Final[dict[str, Scenario]] = {name: TABLE.pop(name) for name in _OPEN}
"""Scenarios that found a defect which is not mended yet: on the page as such, and run with `--open` alone."""
