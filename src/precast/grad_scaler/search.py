"""``init_scale="auto"``: the scale is found from the size of the first gradients, not by skipping up to 16 steps.

The first iteration runs at `FIRST`. If its gradients are finite, the largest of them says which scale brings it near
float16's largest number; the next iteration has half that scale, as the next batch's gradients may be larger. If they
are not finite, the scale falls by `FALL`; if all are zero, it rises by as much; then the next iteration tries again.
Gradients shrink in the first steps of training, so the 1st, 2nd, 4th, 8th ... iteration after that measures again, and
may raise the scale, with less room left.

Invariants: only the iterations that measure wait for the device; which ones these are depends on their number alone,
so all processes that decide together also measure together, and find one scale.
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

__all__ = ["FALL", "FIRST", "ScaleSearch", "fitting", "no_search", "search_for"]

FIRST = 2.0**10
"""The scale of the first iteration: low enough for gradients up to 64, and losses of small ones keep their bits."""

FALL = 2.0**-12
"""What the scale is multiplied by if it was too high: two skips reach 2**-14, and the next good iteration goes up."""

HIGHEST = 2.0**34
"""If gradients are all zero, the scale rises by ``1 / FALL`` up to here: two rises find gradients of 1e-17."""

ROOM = 2.0
"""How much larger than the largest measured gradient those of the next batch may be without overflowing."""

SMALLER_ROOM = 1.5
"""The same from the second measurement on, while nothing has overflowed."""

_MOST_BACKOFFS = 100  # that count: beyond, the room would not stay a finite number


def search_for(init_scale: Any, floor: Any, ceiling: Any) -> tuple[ScaleSearch, Any]:
    """The search that ``init_scale="auto"`` asks for, and the scale to begin with, not checked yet."""
    if not (isinstance(init_scale, str) and init_scale == "auto"):
        return no_search(), init_scale
    first = max(FIRST, floor) if isinstance(floor, int | float) else FIRST
    return ScaleSearch(), min(first, ceiling) if isinstance(ceiling, int | float) else first


def no_search() -> ScaleSearch:
    """In the place of a search where the scale was given: it has ended, and no iteration is ever measured again."""
    return ScaleSearch(found_at=sys.maxsize)


def fitting(peak: float) -> float:
    """The largest power of two that keeps gradients of absolute value `peak` in float16's range."""
    return 2.0 ** math.floor(math.log2(torch.finfo(torch.float16).max / peak))


class ScaleSearch:
    """The state of a search.

    Args:
        backoffs: How often the scale was lowered before the search began.
        found_at: The number of the iteration that found the scale; None before.
    """

    def __init__(self, backoffs: int = 0, found_at: int | None = None) -> None:
        self._before, self._found_at = backoffs, found_at

    @property
    def is_searching(self) -> bool:
        """Whether the first scale is still to be found."""
        return self._found_at is None

    def measures(self, iteration: int, growth_interval: int) -> bool:
        """Whether this iteration's gradients are measured."""
        if self._found_at is None:
            return True
        since = iteration - self._found_at
        return 1 <= since < growth_interval and since & (since - 1) == 0

    def after(
        self,
        iteration: int,
        scale: float,
        peaks: Iterable[Tensor | None],
        history: StepHistory,
        limits: Limits,
    ) -> float:
        """The scale of the next iteration, after one that was measured.

        What overflows first need not be a gradient of a parameter, so each time that the scale was lowered doubles
        the room that is left.

        Args:
            iteration: The number of the iteration that was measured.
            scale: Its scale.
            peaks: The largest unscaled gradient of each optimizer, shape (); None of one that was not measured.
            history: Its steps are in it.
            limits: Where the scale has to stay.
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
        self._found_at = iteration if searching else self._found_at
        room = ROOM * 2.0**backoffs if backoffs or searching else SMALLER_ROOM
        found = min(max(fitting(peak * room), limits.min_scale), limits.max_scale)
        return found if searching else max(found, scale)
