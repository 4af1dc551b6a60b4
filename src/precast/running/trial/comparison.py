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

__all__ = ["Comparison", "LossSummary", "Setting", "compare", "region_changes", "unmeasured"]

_TELLING: Final = 0.05
"""A difference of time or memory below this share is none."""
_EQUAL: Final = 0.01
"""A loss that differs by no more than this share is that of float32."""
_MOST_SKIPS: Final = 0.2
"""The share of skipped steps above which a training does not learn as in float32."""

Speed = Literal["faster", "slower", "same", "unclear"]


def region_changes(dtype: str) -> dict[str, Any]:
    """Return the fields of a plan that runs models in regions of a dtype; float16 needs a scaled loss."""
    return {"dtype": dtype, "scales": dtype == "float16"}


def unmeasured(steps: int, warm_up: int) -> int:
    """Return the number of first steps that are not measured: fewer than `warm_up` if the program makes few steps."""
    return warm_up if steps >= 2 * warm_up else steps // 3


@dataclass
class Setting:
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
    changes: dict[str, Any]
    outcomes: list[TrialOutcome] = field(default_factory=list)
    edit: ProgramEdit | None = None

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

    def loss(self, steps: int | None = None) -> float | None:
        """Return the mean loss of the last third of the steps; None if it is not finite or there is none."""
        return loss_of(self.outcomes[0], self.steps if steps is None else steps)


def loss_of(outcome: TrialOutcome, steps: int) -> float | None:
    """Return the mean loss of the last third of the first `steps` steps; None if one is not finite."""
    first = steps - max(1, steps // 3)
    numbers = [each for each in outcome.losses[first:steps] if each is not None]
    if not numbers or any(first <= step < steps for step in outcome.nonfinite):
        return None
    return statistics.fmean(numbers)


@dataclass(frozen=True)
class LossSummary:
    """A loss relative to that of float32.

    Attributes:
        is_equal: the loss is that of float32 within the noise; None if that is not known.
        difference: the relative difference; None if a loss is missing.
        noise: the relative spread over float32 trials with other seeds; None if none was needed.
    """

    is_equal: bool | None
    difference: float | None
    noise: float | None


@dataclass(frozen=True)
class Comparison:
    """A setting relative to float32."""

    setting: Setting
    seconds: float | None
    spread: float | None
    speedup: float | None
    speed: Speed
    memory: float | None
    """The memory divided by that of float32."""
    loss: LossSummary

    @property
    def learns(self) -> bool | None:
        """True if the setting ran without an error and its loss is that of float32; None if that is not known."""
        return False if self.setting.error else self.loss.is_equal

    @property
    def is_better(self) -> bool:
        """True if the setting is faster, or smaller and not slower, and learns."""
        return bool(self.learns) and self._may_pay and self.speed != "unclear"

    @property
    def is_open(self) -> bool:
        """True if more trials may show that the setting is better."""
        is_unclear = self.speed == "unclear" or self.learns is None
        return (
            is_unclear and self.learns is not False and (self._may_pay or self.speed == "unclear")
        )

    @property
    def is_smaller(self) -> bool:
        """True if the setting needs less memory."""
        return self.memory is not None and self.memory <= 1 - _TELLING

    @property
    def _may_pay(self) -> bool:
        return self.speed == "faster" or (self.is_smaller and self.speed != "slower")


def compare(
    setting: Setting, base: Setting, warm_up: int, others: Iterable[TrialOutcome]
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
    own = setting.seconds(warm_up)
    speedup, speed = None, "unclear"
    if ours and theirs and ours[0] > 0:
        speedup = theirs[0] / ours[0]
        speed = _speed(speedup, (ours[1] + theirs[1]) / ours[0])
    sizes = setting.peak_memory, base.peak_memory
    return Comparison(
        setting=setting,
        seconds=own and own[0],
        spread=own and own[1],
        speedup=speedup,
        speed=speed,  # type: ignore[arg-type]
        memory=sizes[0] / sizes[1] if sizes[0] and sizes[1] else None,
        loss=_loss(setting, base, steps, others),
    )


def _speed(speedup: float, noise: float) -> Speed:
    if abs(speedup - 1) > max(noise, _TELLING):
        return "faster" if speedup > 1 else "slower"
    return "same" if noise <= _TELLING else "unclear"


def _loss(
    setting: Setting, base: Setting, steps: int, others: Iterable[TrialOutcome]
) -> LossSummary:
    if steps == 0 or not base.outcomes or not setting.outcomes:
        return LossSummary(None, None, None)
    if setting.skipped > max(1, _MOST_SKIPS * len(setting.outcomes[0].seconds)):
        return LossSummary(False, None, None)
    if steps > 1 and setting.outcomes[0].losses[steps - 1] is None and not setting.nonfinite:
        steps -= 1  # the scale of the last step is not known
    expected, number = base.loss(steps), setting.loss(steps)
    if expected is None:  # there is no loss, or float32 does not learn either
        return LossSummary(None, None, None)
    if number is None:
        return LossSummary(False, None, None)
    scale = abs(expected) or 1.0
    difference = abs(number - expected) / scale
    losses = [loss_of(each, steps) for each in others if len(each.seconds) >= steps]
    numbers = [expected, *(each for each in losses if each is not None)]
    if difference <= _EQUAL:
        return LossSummary(True, difference, None)
    if len(numbers) == 1:
        return LossSummary(None, difference, None)
    noise = (max(numbers) - min(numbers)) / 2 / scale
    return LossSummary(difference <= max(_EQUAL, noise), difference, noise)
