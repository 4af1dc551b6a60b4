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

_OPEN: tuple[str, ...] = ()

OPEN: Final[dict[str, Scenario]] = {name: TABLE.pop(name) for name in _OPEN}
"""Scenarios that found a defect which is not mended yet: on the page as such, and run with `--open` alone."""
