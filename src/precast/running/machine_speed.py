"""The speed of this machine's CPU in the 16-bit dtypes that a run used there, measured after the run.

A CPU without instructions for a dtype emulates it, and mixed precision then makes the run slower. GPUs are not
measured: those that PyTorch supports multiply in both dtypes at least as fast as in float32.

Invariant: the program has ended; measuring takes a few tenths of a second and changes nothing of it.
"""

from __future__ import annotations

import torch

from precast.diagnostics.hardware.machine import matmul_speed
from precast.report.schema import RunDocument
from precast.report.tree import ran_in

__all__ = ["speeds_of"]

_DTYPES = ("bfloat16", "float16")


def speeds_of(document: RunDocument) -> dict[str, float]:
    """Return how many times as fast as float32 the CPU multiplies, in 16-bit dtypes; empty if the run used none there.

    If the run used one dtype, the other is measured, too: it may be the faster one.
    """
    rows = document.trace.rows if document.trace else []
    used = {ran_in(row) for row in rows if row.device_type == "cpu" and row.rule == "lower"}
    if used.isdisjoint(_DTYPES):
        return {}
    ratios = {dtype: matmul_speed(torch.device("cpu"), dtype) for dtype in _DTYPES}
    return {dtype: ratio for dtype, ratio in ratios.items() if ratio is not None}
