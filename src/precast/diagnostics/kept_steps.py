"""The steps of a run, in memory that does not grow with the run.

Invariants: at most `limit` steps are kept, spread evenly over the run, and beside them at most half as many skipped
steps; the totals count all steps. Nothing here imports torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from precast.diagnostics.schema import Step

__all__ = ["KeptSteps"]


@dataclass
class KeptSteps:
    """The kept steps, and totals of all."""

    limit: int = 2000
    """At most so many steps are kept; at least 2."""
    count: int = 0
    skipped: int = 0
    nonfinite: int = 0
    """How many steps were not skipped and had a loss that was infinite or NaN."""
    first_nonfinite: int | None = None
    """The number of the first of these."""
    skipped_nonfinite: int = 0
    """How many steps were skipped and had a loss that was infinite or NaN."""
    first_skipped: Step | None = None
    _every: list[Step] = field(default_factory=list)
    _stride: int = 1
    _skips: list[Step] = field(default_factory=list)
    _skip_stride: int = 1
    _last: Step | None = None

    def add(self, step: Step) -> None:
        """Adds a step."""
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

    def kept(self) -> list[Step]:
        """The steps that are kept, and the last one, in their order; numbers that are not finite are None."""
        last = [] if self._last is None else [self._last]
        steps = {step.step: step for step in (*self._every, *self._skips, *last)}
        kept = (steps[number] for number in sorted(steps))
        return [replace(s, loss=_finite(s.loss), scale=_finite(s.scale)) for s in kept]


def _finite(number: float | None) -> float | None:
    """The number if JSON can say it, else None."""
    return number if number is not None and math.isfinite(number) else None
