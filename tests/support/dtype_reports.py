"""Reports of a device's speed with chosen ratios."""

from __future__ import annotations

from typing import Any

from precast.diagnostics.hardware.machine import DtypeReport, OperationSpeed

OPERATIONS = ("matmul", "convolution", "convolution backward")


def report(dtype: str, *ratios: float | None, device: str = "cpu", units: Any = ()) -> DtypeReport:
    """Return a report with these ratios for matmul, convolution and its backward; None is unsupported."""
    speeds = (
        OperationSpeed(name, error="not implemented")
        if ratio is None
        else OperationSpeed(name, 1.0, ratio)
        for name, ratio in zip(OPERATIONS, ratios, strict=True)
    )
    return DtypeReport(device, dtype, tuple(speeds), tuple(units))
