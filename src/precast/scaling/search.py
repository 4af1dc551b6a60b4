"""``init_scale="auto"``: the scale from the size of the first gradients, in place of up to 16 skipped steps.

The first iteration runs at `FIRST`. Where its gradients are finite, the largest of them says what
scale brings it near float16's largest number: the next iteration has that scale. Where they are not,
the scale falls by `FALL` and the next iteration tries again.

Invariants: only the iterations of the search wait for the device; all processes that reduce their
verdicts find the same scale, as the largest gradient is reduced the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from precast.scaling.settings import Limits

__all__ = ["FALL", "FIRST", "fitting", "next_scale"]

FIRST = 2.0**10
"""The scale of the first iteration: low enough for gradients up to 64, and losses of small ones keep their bits."""

FALL = 2.0**-12
"""What the scale is multiplied by where that was too high: two skips reach 2**-14; the next good iteration goes up."""

_ROOM = 2.0
"""How far below float16's largest number the largest gradient is to be: batches differ."""


def fitting(peak: float) -> float:
    """The largest power of two that keeps gradients of absolute value `peak` below half of float16's range."""
    return 2.0 ** math.floor(math.log2(torch.finfo(torch.float16).max / _ROOM / peak))


def next_scale(
    scale: float, skipped: bool, peaks: Iterable[Tensor], limits: Limits
) -> tuple[float, bool]:
    """The scale of the next iteration, and whether the search goes on: from the largest unscaled gradients."""
    if skipped:
        return max(scale * FALL, limits.min_scale), True
    peak = max(map(float, peaks), default=0.0)
    if peak == 0.0 or not math.isfinite(peak):
        return scale, True
    return min(max(fitting(peak), limits.min_scale), limits.max_scale), False
