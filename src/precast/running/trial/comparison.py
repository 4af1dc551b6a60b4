"""The comparison of settings: time, memory and loss of mixed precision relative to float32, each with its noise.

Invariants: nothing here imports torch. Two settings are compared over the steps that all their trials made. What the
measurements do not decide is "unclear", or None.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from precast.running.trial.plan import TrialOutcome
from precast.running.trial.program_edit import ProgramEdit

__all__ = ["Comparison", "TrialSetting", "compare", "unmeasured"]

_TELLING: Final = 0.05
"""A difference of time or memory below this share is none."""
_EQUAL: Final = 0.01
"""A loss that differs by no more than this share is that of float32."""
_MOST_SKIPS: Final = 0.2
"""The share of skipped steps above which a training does not learn as in float32."""


def unmeasured(steps: int, warm_up: int) -> int:
    """Return the number of first steps that are not measured: fewer than `warm_up` if the program makes few steps."""
    return warm_up if steps >= 2 * warm_up else steps // 3


@dataclass
class TrialSetting:
    """One way to run the program, and its trials.

    Attributes:
        name: the name in the table.
        dtype: "float32", or the 16-bit dtype of its regions.
        changes: the fields of its plans that differ from those of float32.
        outcomes: its trials with the program's first seed.
        edit: the lines that it adds to the program.
    """

    name: str
    dtype: str
    changes: dict[str, Any] = field(default_factory=dict)
    outcomes: list[TrialOutcome] = field(default_factory=list)
    edit: ProgramEdit = field(default_factory=ProgramEdit)

    @property
    def error(self) -> str | None:
        """The error that ended a trial."""
        return next((each.error for each in self.outcomes if each.ended == "error"), None)

    @property
    def steps(self) -> int:
        """The number of steps that all trials made."""
        return min((len(each.seconds) for each in self.outcomes), default=0)

    @property
    def peak_memory(self) -> int | None:
        """The largest memory of a trial, in bytes."""
        sizes = [each.peak_memory for each in self.outcomes if each.peak_memory is not None]
        return max(sizes, default=None)

    @property
    def skipped(self) -> int:
        """The steps that were skipped in the first trial."""
        return self.outcomes[0].skipped if self.outcomes else 0

    @property
    def nonfinite(self) -> int:
        """The steps with an infinite or NaN loss in the first trial."""
        return len(self.outcomes[0].nonfinite) if self.outcomes else 0

    def seconds(self, warm_up: int, steps: int | None = None) -> tuple[float, float] | None:
        """Return the time of a step and its spread; None without a measured step.

        Other load on the machine only adds time. So each step counts with its least time in all trials.
        """
        steps = self.steps if steps is None else steps
        first = unmeasured(steps, warm_up)
        rounds = [each.seconds[first:steps] for each in self.outcomes]
        if not rounds or not rounds[0]:
            return None
        best = statistics.fmean(map(min, zip(*rounds, strict=True)))
        means = [statistics.fmean(each) for each in rounds]
        if len(rounds) > 1:
            return best, (max(means) - min(means)) / 2
        spread = statistics.stdev(rounds[0]) if len(rounds[0]) > 1 else best
        return best, spread / math.sqrt(len(rounds[0]))

    def loss(self) -> float | None:
        """Return the mean loss of the last steps; None if it is not finite or there is none."""
        return _loss_of(self.outcomes[0], self.steps) if self.steps else None


def _loss_of(outcome: TrialOutcome, steps: int) -> float | None:
    """Return the mean loss of the last third of the first `steps` steps; None if one is not finite."""
    first = steps - max(1, steps // 3)
    values = [each for each in outcome.losses[first:steps] if each is not None]
    if not values or any(first <= step < steps for step in outcome.nonfinite):
        return None
    return statistics.fmean(values)


@dataclass(frozen=True)
class Comparison:
    """A setting relative to float32."""

    setting: TrialSetting
    seconds: float | None
    spread: float | None
    speedup: float | None
    speed: Literal["faster", "slower", "same", "unclear"]
    memory: float | None
    """The memory divided by that of float32."""
    is_equal: bool | None
    """The loss is that of float32 within the noise; None if that is not known."""
    difference: float | None = None
    """The relative difference of the losses; None if a loss is missing."""
    noise: float | None = None
    """The relative spread of the loss over float32 trials with other seeds; None if none was needed."""

    @property
    def learns(self) -> bool | None:
        """True if the setting ran without an error and its loss is that of float32; None if that is not known."""
        return False if self.setting.error else self.is_equal

    @property
    def is_better(self) -> bool:
        """True if the setting is faster, or smaller and not slower, and learns."""
        return bool(self.learns) and self._may_pay and self.speed != "unclear"

    @property
    def is_open(self) -> bool:
        """True if more trials may show that the setting is better."""
        if self.learns is False:
            return False
        return self.speed == "unclear" or (self.learns is None and self._may_pay)

    @property
    def _may_pay(self) -> bool:
        is_smaller = self.memory is not None and self.memory <= 1 - _TELLING
        return self.speed == "faster" or (is_smaller and self.speed != "slower")


def compare(
    setting: TrialSetting, base: TrialSetting, warm_up: int, others: Iterable[TrialOutcome] = ()
) -> Comparison:
    """Compare a setting with float32.

    Args:
        setting: the setting.
        base: float32.
        warm_up: the first steps, which are not measured.
        others: trials of float32 with other seeds.
    """
    steps = min(setting.steps, base.steps)
    ours, theirs = setting.seconds(warm_up, steps), base.seconds(warm_up, steps)
    seconds, spread = setting.seconds(warm_up) or (None, None)
    speedup, noise = None, 0.0
    if ours and theirs and ours[0] > 0:
        speedup, noise = theirs[0] / ours[0], (ours[1] + theirs[1]) / ours[0]
    sizes = setting.peak_memory, base.peak_memory
    memory = sizes[0] / sizes[1] if sizes[0] and sizes[1] else None
    loss = _compare_losses(setting, base, steps, others)
    return Comparison(setting, seconds, spread, speedup, _speed(speedup, noise), memory, *loss)


def _speed(speedup: float | None, noise: float) -> Literal["faster", "slower", "same", "unclear"]:
    if speedup is not None and abs(speedup - 1) > max(noise, _TELLING):
        return "faster" if speedup > 1 else "slower"
    return "unclear" if speedup is None or noise > _TELLING else "same"


def _compare_losses(
    setting: TrialSetting, base: TrialSetting, steps: int, others: Iterable[TrialOutcome]
) -> tuple[bool | None, float | None, float | None]:
    """Return the last three fields of a `Comparison`."""
    if steps == 0:
        return None, None, None
    ours, theirs = setting.outcomes[0], base.outcomes[0]
    if setting.skipped > max(1, _MOST_SKIPS * len(ours.seconds)):
        return False, None, None
    if steps > 1 and ours.losses[steps - 1] is None and not setting.nonfinite:
        steps -= 1  # the scale of the last step is not known
    expected, actual = _loss_of(theirs, steps), _loss_of(ours, steps)
    if expected is None:  # there is no loss, or float32 does not learn either
        return None, None, None
    if actual is None:
        return False, None, None
    scale = abs(expected) or 1.0
    difference = abs(actual - expected) / scale
    losses = [_loss_of(each, steps) for each in others if len(each.seconds) >= steps]
    values = [expected, *(each for each in losses if each is not None)]
    if difference <= _EQUAL:
        return True, difference, None
    if len(values) == 1:
        return None, difference, None
    noise = (max(values) - min(values)) / 2 / scale
    return difference <= max(_EQUAL, noise), difference, noise
