"""The speed of this machine's CPU in the 16-bit dtypes, measured after a run that used one there.

A CPU without instructions for a dtype emulates it, and mixed precision then makes the run slower. GPUs are not
measured: those that PyTorch supports multiply in both dtypes at least as fast as in float32.
"""

from __future__ import annotations

import torch

from precast.diagnostics.hardware.machine import matmul_speed
from precast.report.schema import RunDocument
from precast.report.tree import ran_in

__all__ = ["cpu_speeds", "speeds_of"]

_DTYPES = ("bfloat16", "float16")


def cpu_speeds() -> dict[str, float]:
    """Return how many times as fast as float32 the CPU multiplies, in 16-bit dtypes, in a few tenths of a second."""
    ratios = {dtype: matmul_speed(torch.device("cpu"), dtype) for dtype in _DTYPES}
    return {dtype: ratio for dtype, ratio in ratios.items() if ratio is not None}


def speeds_of(document: RunDocument) -> dict[str, float]:
    """Return the speeds in both dtypes, as the other one may be the faster; empty if the run used none on a CPU."""
    rows = document.trace.rows if document.trace else []
    used = {ran_in(row) for row in rows if row.device_type == "cpu" and row.rule == "lower"}
    return {} if used.isdisjoint(_DTYPES) else cpu_speeds()
