"""The steps of a run, in memory that does not grow with the run.

Invariants: at most `limit` steps are stored, spread evenly over the run, and at most half as many skipped steps; the
totals count all steps. Nothing here imports torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from precast.report.schema import StepData

__all__ = ["StepLog"]


@dataclass
class StepLog:
    """A selection of the steps of a run, and totals over all steps."""

    limit: int = 2000
    """The most steps to store; at least 2."""
    count: int = 0
    skipped: int = 0
    nonfinite: int = 0
    """The number of steps that were not skipped and had an infinite or NaN loss."""
    first_nonfinite: int | None = None
    """The first of these steps."""
    skipped_nonfinite: int = 0
    """The number of skipped steps with an infinite or NaN loss."""
    first_skipped: StepData | None = None
    _every: list[StepData] = field(default_factory=list)
    _stride: int = 1
    _skips: list[StepData] = field(default_factory=list)
    _skip_stride: int = 1
    _last: StepData | None = None

    def add(self, step: StepData) -> None:
        """Add a step."""
        self.count += 1
        self._last = step
        if step.loss is not None and not math.isfinite(step.loss):
            if step.skipped:
                self.skipped_nonfinite += 1
            else:
                self.nonfinite += 1
                if self.first_nonfinite is None:
                    self.first_nonfinite = step.step
        if step.skipped:
            self.first_skipped = self.first_skipped or step
            if self.skipped % self._skip_stride == 0:
                self._skips.append(step)
            self.skipped += 1
            if len(self._skips) > self.limit // 2:
                self._skips, self._skip_stride = self._skips[::2], 2 * self._skip_stride
        elif step.step % self._stride == 0:
            self._every.append(step)
            while len(self._every) > self.limit:
                self._stride *= 2
                self._every = [s for s in self._every if s.step % self._stride == 0]

    def steps(self) -> list[StepData]:
        """Return the stored steps and the last one, in order; values that are not finite are None."""
        last = [] if self._last is None else [self._last]
        by_number = {step.step: step for step in (*self._every, *self._skips, *last)}
        ordered = (by_number[number] for number in sorted(by_number))
        return [replace(s, loss=_finite(s.loss), scale=_finite(s.scale)) for s in ordered]

    def losses(self) -> dict[int, float | None]:
        """Return the loss of each stored step, also if it is not finite."""
        return {step.step: step.loss for step in (*self._every, *self._skips)}


def _finite(number: float | None) -> float | None:
    """Return the number if it is finite, as JSON requires, else None."""
    return number if number is not None and math.isfinite(number) else None
