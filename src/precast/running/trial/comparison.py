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

__all__ = ["Comparison", "TrialSetting", "compare"]

_TELLING: Final = 0.05  # a difference of time or memory below this share is none
_HOPELESS: Final = 0.8  # a setting with a lower speedup is not measured again
_EQUAL: Final = 0.01  # a loss that differs by no more than this share is that of float32
_MOST_SKIPS: Final = (
    0.2  # above this share of skipped steps, a training does not learn as in float32
)


@dataclass
class TrialSetting:
    """One way to run the program, and its trials with the program's first seed."""

    name: str
    dtype: str  # "float32", or the 16-bit dtype of its regions
    changes: dict[str, Any] = field(default_factory=dict)  # of the plan of float32
    outcomes: list[TrialOutcome] = field(default_factory=list)
    edit: ProgramEdit = field(default_factory=ProgramEdit)

    def variant(self, name: str, *lines: str, **changes: Any) -> TrialSetting:
        """Return a setting with further changes, and lines for them. A patch is replaced by regions around models."""
        own = {"dtype": self.dtype} if "sources" in self.changes else self.changes
        edit = ProgramEdit([*self.edit.lines, *lines])
        return TrialSetting(f"{self.name}, {name}", self.dtype, {**own, **changes}, edit=edit)

    @property
    def first(self) -> TrialOutcome:
        """The first trial; an empty outcome if there was none."""
        return self.outcomes[0] if self.outcomes else TrialOutcome()

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
        return max((each.peak_memory or 0 for each in self.outcomes), default=0) or None

    def seconds(self, steps: int) -> tuple[float, float] | None:
        """Return the time of a step and its spread, over the first steps; None if none of them was measured.

        Other load on the machine only adds time, so each step counts with its least time in all trials.
        """
        rounds = [each.seconds[each.unmeasured(steps) : steps] for each in self.outcomes]
        if not rounds or not rounds[0]:
            return None
        best = statistics.fmean(map(min, zip(*rounds, strict=True)))
        means = [statistics.fmean(each) for each in rounds]
        if len(rounds) > 1:
            return best, (max(means) - min(means)) / 2
        spread = statistics.stdev(rounds[0]) if len(rounds[0]) > 1 else best
        return best, spread / math.sqrt(len(rounds[0]))


@dataclass(frozen=True)
class Comparison:
    """A setting compared with float32."""

    setting: TrialSetting
    speedup: float | None  # the time of a step in float32, divided by that of the setting
    speed: Literal["faster", "slower", "same", "unclear"]
    memory: float | None  # that of the setting, divided by that of float32
    is_equal: bool | None  # the loss is that of float32 within the noise; None if that is not known
    difference: float | None = None  # of the losses, relative; None if a loss is missing
    noise: float | None = None  # of the loss in float32, relative; None if the losses are so close

    @property
    def learns(self) -> bool | None:
        """True if the setting ran without an error and its loss is that of float32; None if that is not known."""
        return False if self.setting.error else self.is_equal

    @property
    def is_better(self) -> bool:
        """True if the setting is faster, or smaller and not slower, and learns."""
        return bool(self.learns) and self._may_pay and self.speed != "unclear"

    @property
    def is_hopeless(self) -> bool:
        """True if no more trials are worth their time."""
        return self.learns is False or (self.speedup or 1.0) < _HOPELESS

    @property
    def is_open(self) -> bool:
        """True if more trials may show that the setting is better."""
        is_open = self.speed == "unclear" or (self.learns is None and self._may_pay)
        return self.learns is not False and is_open

    @property
    def _may_pay(self) -> bool:
        is_smaller = self.memory is not None and self.memory <= 1 - _TELLING
        return self.speed == "faster" or (is_smaller and self.speed != "slower")


def compare(
    setting: TrialSetting, base: TrialSetting, others: Iterable[TrialOutcome] = ()
) -> Comparison:
    """Compare a setting with float32, `base`; `others` are trials of float32 with other seeds.

    The noise of the loss is its spread over these, and over repeated trials, which differ if nothing repeats them.
    """
    steps = min(setting.steps, base.steps)
    ours, theirs = setting.seconds(steps), base.seconds(steps)
    speedup: float | None = None
    speed: Literal["faster", "slower", "same", "unclear"] = "unclear"
    if ours and theirs and ours[0] > 0:
        speedup, noise = theirs[0] / ours[0], (ours[1] + theirs[1]) / ours[0]
        if abs(speedup - 1) > max(noise, _TELLING):
            speed = "faster" if speedup > 1 else "slower"
        elif noise <= _TELLING:
            speed = "same"
    size, base_size = setting.peak_memory, base.peak_memory
    memory = size / base_size if size and base_size else None
    losses = _compare_losses(setting.first, base, steps, [*others])
    return Comparison(setting, speedup, speed, memory, *losses)


def _compare_losses(
    ours: TrialOutcome, base: TrialSetting, steps: int, others: list[TrialOutcome]
) -> tuple[bool | None, float | None, float | None]:
    """Return the last three fields of a `Comparison`."""
    if steps and ours.skipped > max(1, _MOST_SKIPS * len(ours.seconds)):
        return False, None, None
    expected, actual = base.first.loss(steps), ours.loss(steps)
    if expected is None:  # there is no loss, or float32 does not learn either
        return None, None, None
    if actual is None:
        return False, None, None
    scale = abs(expected) or 1.0
    difference = abs(actual - expected) / scale
    if difference <= _EQUAL:
        return True, difference, None
    others = [each for each in others if len(each.seconds) >= steps]
    losses = [each.loss(steps) for each in (*base.outcomes, *others)]
    values = [each for each in losses if each is not None]
    noise = (max(values) - min(values)) / 2 / scale
    return (difference <= noise if others else None), difference, noise
