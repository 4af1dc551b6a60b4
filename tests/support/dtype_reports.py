"""Reports of a device's speed with chosen ratios."""

from __future__ import annotations

from precast.diagnostics.hardware.machine import DtypeReport


def report(dtype: str, ratio: float | None, device: str = "cpu") -> DtypeReport:
    """Return a report with a ratio; None is unsupported."""
    if ratio is None:
        return DtypeReport(device, dtype, error="not implemented")
    return DtypeReport(device, dtype, 1.0, ratio)
