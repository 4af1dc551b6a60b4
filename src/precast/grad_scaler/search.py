"""``init_scale="auto"``: the scale from the size of the first gradients, in place of up to 16 skipped steps.

The first iteration runs at `FIRST`. Where its gradients are finite, the largest of them says what
scale brings it near float16's largest number: the next iteration has half that scale, as the next
batch's gradients may be larger. Where they are not, the scale falls by `FALL`, where all are zero it
rises by as much, and the next iteration tries again. Gradients shrink in the first steps of training,
so the 1st, 2nd, 4th, 8th ... iteration after that measures again, and may raise the scale, with less
room left.

Invariants: only the iterations that measure wait for the device; which ones these are depends on
their number alone, so all processes that reduce their verdicts measure together and find one scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from precast.grad_scaler.ledger import Ledger
from precast.grad_scaler.settings import Limits

__all__ = ["FALL", "FIRST", "Search", "fitting"]

FIRST = 2.0**10
"""The scale of the first iteration: low enough for gradients up to 64, and losses of small ones keep their bits."""

FALL = 2.0**-12
"""What the scale is multiplied by where that was too high: two skips reach 2**-14; the next good iteration goes up."""


HIGHEST = 2.0**34
"""Where gradients are all zero the scale rises by ``1 / FALL`` up to here: two rises find gradients of 1e-17."""

ROOM = 2.0
"""What is left between the largest gradient that was measured and what overflows, for the next batch's."""

SMALLER_ROOM = 1.5
"""The same from the second measurement on, as long as nothing has overflowed."""

_MOST_BACKOFFS = 100  # that leave more room: it stays a number


def fitting(peak: float) -> float:
    """The largest power of two that keeps gradients of absolute value `peak` in float16's range."""
    return 2.0 ** math.floor(math.log2(torch.finfo(torch.float16).max / peak))


class Search:
    """Where a search is: `found_at` is the iteration that found the scale, None before.

    Args:
        backoffs: How many there were before it.
    """

    def __init__(self, backoffs: int = 0) -> None:
        self.found_at: int | None = None
        self._before = backoffs

    def measures(self, iteration: int, growth_interval: int) -> bool:
        """Whether this iteration's gradients are measured."""
        if self.found_at is None:
            return True
        since = iteration - self.found_at
        return 1 <= since < growth_interval and since & (since - 1) == 0

    def after(
        self, iteration: int, scale: float, peaks: Iterable[Tensor], ledger: Ledger, limits: Limits
    ) -> float:
        """The next iteration's scale, after one that was measured: `peaks` are the largest unscaled gradients.

        What overflows first need not be a gradient of a parameter. Each time that the scale had to
        back off, the room that is left doubles.
        """
        searching, counters = self.found_at is None, ledger.counters
        backoffs = min(counters.backoffs - self._before, _MOST_BACKOFFS)
        if counters.consecutive_skips:
            return max(scale * FALL, limits.min_scale) if searching else scale
        peak = max(map(float, peaks), default=0.0)
        if searching and peak == 0.0:  # nothing there, or all of it vanished
            return min(max(scale, min(scale / FALL, HIGHEST)), limits.max_scale)
        if peak == 0.0 or not math.isfinite(peak):
            return scale
        self.found_at = iteration if searching else self.found_at
        room = ROOM * 2.0**backoffs if backoffs or searching else SMALLER_ROOM
        found = min(max(fitting(peak * room), limits.min_scale), limits.max_scale)
        return found if searching else max(found, scale)
