"""The next scale: set by hand, or computed from gradients (``init_scale="auto"``).

The search for a first scale measures the first gradients; PyTorch's default skips up to 16 steps instead. The first
iteration runs at `FIRST`. If its gradients are finite, the largest of them determines the scale that brings it near
float16's largest number; the next iteration uses half of that scale, because the gradients of the next batch may be
larger. If they are not finite, the scale is multiplied by `FALL`; if all are zero, it is divided by `FALL`; then the
next iteration measures again. Gradients shrink in the first steps of training, so the 1st, 2nd, 4th, 8th ... iteration
after that measures again, and may raise the scale, with a smaller margin.

Invariants:
- the scale stays finite and between its limits, and is changed in place on its device;
- only iterations that measure wait for the device. They depend on the iteration's number alone, so all processes that
  decide together also measure together, and compute the same scale.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from precast.grad_scaler.settings import Limits
from precast.grad_scaler.step_history import StepHistory

__all__ = ["FIRST", "SMALLER_ROOM", "ScaleSearch", "fitting", "search_for", "set_scale"]

FIRST = 2.0**10
"""The scale of the first iteration: gradients up to 64 do not overflow, and losses of small ones keep their bits."""

FALL = 2.0**-12
"""The factor for a scale that was too high: two skips reach 2**-14, and the next good iteration raises it again."""

HIGHEST = 2.0**34
"""Upper limit while all gradients are zero: two increases reach gradients of 1e-17."""

ROOM = 2.0
"""The factor by which the next batch's gradients may exceed the largest measured one without overflowing."""

SMALLER_ROOM = 1.5
"""The same from the second measurement on, while nothing has overflowed."""

_MOST_BACKOFFS = 100  # counted at most, so that the factor stays a finite number


def set_scale(scale: Tensor, value: float | Tensor, limits: Limits) -> None:
    """Set a scale to the nearest number between the limits; NaN counts as below them."""
    low, high = limits.min_scale, limits.max_scale
    scale.copy_(value).nan_to_num_(nan=low).clamp_(low, high)  # type: ignore[arg-type]


def search_for(arguments: dict[str, Any]) -> tuple[ScaleSearch, dict[str, Any]]:
    """Return the search, and a scaler's arguments with a number in place of ``init_scale="auto"``."""
    first, floor, ceiling = (arguments[name] for name in ("init_scale", "min_scale", "max_scale"))
    if not (isinstance(first, str) and first == "auto"):
        return ScaleSearch(False), arguments
    first = max(FIRST, floor) if isinstance(floor, int | float) else FIRST
    first = min(first, ceiling) if isinstance(ceiling, int | float) else first
    return ScaleSearch(True), {**arguments, "init_scale": first}


def fitting(peak: float) -> float:
    """Return the largest power of two that keeps gradients of absolute value `peak` in float16's range."""
    return 2.0 ** math.floor(math.log2(torch.finfo(torch.float16).max / peak))


class ScaleSearch:
    """The state of the search for a first scale.

    Args:
        searching: False if the first scale is a number: then no iteration is measured.
        backoffs: Number of decreases of the scale before the search.
    """

    def __init__(self, searching: bool, backoffs: int = 0) -> None:
        self._before = backoffs
        self._end = None if searching else sys.maxsize
        """The number of the iteration that ended the search; None until then."""

    @property
    def is_searching(self) -> bool:
        """True until the first scale has been determined."""
        return self._end is None

    def measures(self, iteration: int, growth_interval: int) -> bool:
        """Return True if this iteration's gradients are measured."""
        if self._end is None:
            return True
        since = iteration - self._end
        return 1 <= since < growth_interval and since & (since - 1) == 0

    def after(
        self,
        iteration: int,
        scale: float,
        peaks: Iterable[Tensor | None],
        history: StepHistory,
        limits: Limits,
    ) -> float:
        """Return the scale of the next iteration, after one that was measured.

        Values other than gradients of parameters may overflow first, so each decrease of the scale doubles the margin.
        `peaks` are the largest unscaled gradients of the optimizers, shape (); None for one that was not measured.
        """
        searching, counters = self.is_searching, history.counters
        backoffs = min(counters.backoffs - self._before, _MOST_BACKOFFS)
        if counters.consecutive_skips:
            return max(scale * FALL, limits.min_scale) if searching else scale
        peak = max((float(peak) for peak in peaks if peak is not None), default=0.0)
        if searching and peak == 0.0:  # no gradients, or all of them underflowed
            return min(max(scale, min(scale / FALL, HIGHEST)), limits.max_scale)
        if peak == 0.0 or not math.isfinite(peak):
            return scale
        self._end = iteration if searching else self._end
        room = ROOM * 2.0**backoffs if backoffs or searching else SMALLER_ROOM
        best = min(max(fitting(peak * room), limits.min_scale), limits.max_scale)
        return best if searching else max(best, scale)
