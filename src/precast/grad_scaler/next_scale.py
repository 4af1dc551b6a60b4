"""The next scale: set by hand, adapted to what an iteration found, or found from gradients (``init_scale="auto"``).

The search for a first scale looks at the size of the first gradients, where the default skips up to 16 steps. The first
iteration runs at `FIRST`. If its gradients are finite, the largest of them says which scale brings it near float16's
largest number; the next iteration has half that scale, as the next batch's gradients may be larger. If they are not
finite, the scale falls by `FALL`; if all are zero, it rises by as much; then the next iteration tries again. Gradients
shrink in the first steps of training, so the 1st, 2nd, 4th, 8th ... iteration after that measures again, and may raise
the scale, with less room left.

Invariants:
- the scale stays finite and between its limits, and is changed in place on its device;
- only the iterations that measure wait for the device; which ones these are depends on their number alone, so all
  processes that decide together also measure together, and find one scale.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from precast import _torch
from precast.grad_scaler.settings import LARGEST_SCALE, Limits
from precast.grad_scaler.step_history import StepHistory

__all__ = [
    "FIRST",
    "SMALLER_ROOM",
    "ScaleSearch",
    "adapt_scale",
    "fitting",
    "search_for",
    "set_scale",
]

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


def set_scale(scale: Tensor, value: float | Tensor, limits: Limits) -> None:
    """Sets a scale to the nearest number between the limits; NaN counts as below them."""
    low, high = limits.min_scale, limits.max_scale
    scale.copy_(value).nan_to_num_(nan=low).clamp_(low, high)  # type: ignore[arg-type]


def adapt_scale(
    scale: Tensor,
    tracker: Tensor,
    found_inf: Tensor,
    factors: tuple[float, float, int],
    limits: Limits,
    *,
    skipped: bool | None,
) -> None:
    """Lowers a scale after a skipped iteration; raises it after enough good ones.

    Args:
        scale: Float32, shape ().
        tracker: The number of good iterations in a row, int32, shape ().
        found_inf: Nonzero if the iteration was skipped, shape ().
        factors: The scaler's factors of growth and of backoff, and its growth interval.
        limits: Where the scale has to stay.
        skipped: Whether the iteration was skipped; None if only the device knows.
    """
    growth, backoff, interval = factors
    _torch.update_scale_(
        scale, tracker, found_inf, growth=growth, backoff=backoff, interval=interval
    )
    if skipped is not False or growth < 1.0 or limits.max_scale < LARGEST_SCALE:
        scale.clamp_(limits.min_scale, limits.max_scale)


def search_for(given: dict[str, Any]) -> tuple[ScaleSearch, dict[str, Any]]:
    """The search that ``init_scale="auto"`` asks for, and a scaler's arguments with the scale to begin with instead."""
    first, floor, ceiling = given["init_scale"], given["min_scale"], given["max_scale"]
    if not (isinstance(first, str) and first == "auto"):
        return ScaleSearch(False), given
    first = max(FIRST, floor) if isinstance(floor, int | float) else FIRST
    first = min(first, ceiling) if isinstance(ceiling, int | float) else first
    return ScaleSearch(True), {**given, "init_scale": first}


def fitting(peak: float) -> float:
    """The largest power of two that keeps gradients of absolute value `peak` in float16's range."""
    return 2.0 ** math.floor(math.log2(torch.finfo(torch.float16).max / peak))


class ScaleSearch:
    """The state of a search.

    Args:
        searching: False if there is nothing to search, as the scale was given: then no iteration is measured.
        backoffs: How often the scale was lowered before the search began.
    """

    def __init__(self, searching: bool, backoffs: int = 0) -> None:
        self._before = backoffs
        self._found_at = None if searching else sys.maxsize
        """The number of the iteration that found the scale; None before."""

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
