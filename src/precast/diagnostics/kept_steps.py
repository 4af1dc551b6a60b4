"""The steps of a run, in memory that does not grow with it.

Invariants: at most `limit` steps are kept, spread evenly over the run, and with them at most half as many skipped ones;
totals count all. Nothing here imports torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from precast.diagnostics.schema import Step

__all__ = ["KeptSteps"]


@dataclass
class KeptSteps:
    """What is kept of the steps.

    Attributes:
        limit: at most so many steps are kept, at least 2.
        count: steps there were.
        skipped: of those, skipped.
        nonfinite: of the others, with a loss that was infinite or NaN.
        first_nonfinite: the number of the first of these.
    """

    limit: int = 2000
    count: int = 0
    skipped: int = 0
    nonfinite: int = 0
    first_nonfinite: int | None = None
    first_skipped: Step | None = None
    _every: list[Step] = field(default_factory=list)
    _stride: int = 1
    _skips: list[Step] = field(default_factory=list)
    _skip_stride: int = 1
    _last: Step | None = None

    def add(self, step: Step) -> None:
        """Takes in a step, whose numbers are known."""
        self.count += 1
        self._last = step
        if step.loss is not None and not math.isfinite(step.loss) and not step.skipped:
            self.nonfinite += 1
            self.first_nonfinite = (
                step.step if self.first_nonfinite is None else self.first_nonfinite
            )
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
        """The steps that are kept, the last among them, in their order; numbers that are not finite are None."""
        steps = {step.step: step for step in (*self._every, *self._skips)}
        if self._last is not None:
            steps[self._last.step] = self._last
        kept = (steps[number] for number in sorted(steps))
        return [replace(s, loss=_finite(s.loss), scale=_finite(s.scale)) for s in kept]


def _finite(number: float | None) -> float | None:
    """JSON has no other numbers."""
    return number if number is not None and math.isfinite(number) else None
