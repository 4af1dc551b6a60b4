"""The answer of a proof, its reasons, and the changes that would decide an undecided one.

Invariants:
- the answer has trained as well as float32, within the tolerance, trains every parameter that float32 trains, and is
  better at the objective than float32 and the base policy for certain. Where no setup is, the answer is the better one
  of these two;
- of several such setups the answer is the one with the least time or memory;
- each change that would decide a proof is computed from the measured intervals and times. One that would not help is
  not named.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from precast._internal.display import plural
from precast.tuning.costs import Objective
from precast.tuning.intervals import Interval
from precast.tuning.proof import Proof, SetupComparison, is_time_decided
from precast.tuning.setups import FLOAT32, MOST_BATCHES, Setup
from precast.tuning.tasks import TuningTask
from precast.tuning.words import TRAINING, TaskWords

__all__ = ["Judge", "OtherPrograms", "SearchTime", "deciding_changes", "duration_text"]

_BUSY: Final = 0.1
"""The share of the processors that other programs use on a machine that is not quiet."""


@dataclass(frozen=True)
class Judge:
    """Finds the answer of a proof; `bases` are the names of the setups of the base policy."""

    objective: Objective
    bases: Collection[str]
    words: TaskWords = TRAINING

    def best(self, proof: Proof, setups: Iterable[Setup]) -> tuple[Setup, str]:
        """Return the answer, and a clause on each of the other setups."""
        reasons = {setup.name: self.refusal(proof, setup) for setup in setups}
        able = [setup for setup in setups if not reasons[setup.name]]
        reference = FLOAT32
        for setup in able:
            if setup.name in self.bases:
                reasons[setup.name], is_better = self.gain(proof, setup.name, reference.name)
                reference = setup if is_better else reference
        winners = []
        for setup in able:
            if setup.name not in self.bases:
                reasons[setup.name], is_better = self.gain(proof, setup.name, reference.name)
                compared = proof.comparison(setup.name, reference.name)
                if compared.loss == "worse":
                    _, reasons[setup.name] = self.loss_text(compared, proof.tolerance)
                elif is_better:
                    winners.append(setup)
        best = min(winners, key=lambda setup: self._spent(proof, setup), default=reference)
        return best, "; ".join(reasons.values())

    def undecided(self, proof: Proof, setups: Iterable[Setup]) -> list[str]:
        """Return the names of the setups that may be better than float32."""
        names = []
        for setup in setups:
            compared, ratio = proof.comparison(setup.name), proof.comparison(setup.name).ratio
            may_be_better = ratio.low <= 1 - proof.tolerance
            is_better = ratio.high < 1
            if self.objective == "memory":
                is_better = may_be_better = self.gain(proof, setup.name, FLOAT32.name)[1]
            is_refused = compared.because or compared.loss == "worse" or setup.silent
            if not is_refused and may_be_better and not (compared.is_as_good and is_better):
                names.append(setup.name)
        return names

    def refusal(self, proof: Proof, setup: Setup) -> str:
        """Return why a setup cannot be the answer; "" if it can."""
        quality = proof.comparison(setup.name)
        if not quality.is_as_good:
            return self.loss_text(quality, proof.tolerance)[1]
        if setup.silent:
            return (
                f"under {setup.name} the gradient of {setup.silent} is zero, so it is not trained"
            )
        return ""

    def gain(self, proof: Proof, name: str, against: str) -> tuple[str, bool]:
        """Return a clause on how a setup compares at the objective, and True if it is better for certain."""
        if self.objective == "memory":
            mine, theirs = (proof.figures[each].kept_bytes for each in (name, against))
            share = f"{mine / max(theirs, 1):.2f}"
            return f"{name} {self.words.needs} {share} of the memory of {against}", mine < theirs
        compared, tolerance = proof.comparison(name, against), proof.tolerance
        ratio = compared.ratio
        if not math.isfinite(ratio.high):
            return f"too few times were measured to compare {name} with {against}", False
        figures = f"{ratio.middle:.2f} ({ratio.low:.2f} to {ratio.high:.2f}) of"
        if ratio.high < 1:
            return f"{name} takes {figures} the time of {against}", True
        text = f"could not tell whether {name} is faster than {against}"
        if ratio.low > 1:
            text = f"{name} is slower than {against}"
        elif is_time_decided(compared, tolerance):
            text = f"{name} is not faster than {against} by more than {tolerance:.2%}"
        return f"{text}: it takes {figures} its time", False

    def loss_text(self, compared: SetupComparison, tolerance: float) -> tuple[str, str]:
        """Return a clause on the difference of the losses, and one on why the setup is not accepted for it."""
        name, against, value = compared.name, compared.against, self.words.value
        if compared.because:
            text = f"{name} fails ({compared.because})"
            return text, text
        difference = compared.difference
        if not math.isfinite(difference.high):
            text = f"too few {self.words.trials} were compared to tell the {value} of {name}"
            return text, text
        figures = f"by {difference.low:+.2%} to {difference.high:+.2%}"
        text = f"the {value} of {name} differs from that of {against} {figures}"
        if compared.loss == "worse":
            return text, f"the {value} of {name} is worse than that of {against} {figures}"
        return text, (
            f"could not tell whether the {value} of {name} is that of {against} within {tolerance:.2%}: it differs "
            f"{figures}"
        )

    def _spent(self, proof: Proof, setup: Setup) -> float:
        """Return the time or memory of a setup, by which setups are ordered."""
        if self.objective == "memory":
            return proof.figures[setup.name].kept_bytes
        return proof.comparison(setup.name).ratio.middle


# --- changes that would decide a proof ---


class OtherPrograms:
    """The processor time that other programs use, from the creation of this object; Linux alone counts it."""

    def __init__(self) -> None:
        self._first = _processor_times()

    def share(self) -> float:
        """Return the share of the time of all processors that other programs used; 0 where it is not counted."""
        current, first = _processor_times(), self._first
        if current is None or first is None or current[1] <= first[1]:
            return 0.0
        busy, total, own = (after - before for after, before in zip(current, first, strict=True))
        return min(1.0, max(0.0, (busy - own) / total))


def _processor_times() -> tuple[float, float, float] | None:
    """Return the seconds of all processors that were busy, those in all, and those of this process."""
    try:
        fields = Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]
        ticks = [int(field) / os.sysconf("SC_CLK_TCK") for field in fields]
    except (OSError, ValueError):
        return None
    own = os.times()
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks), own.user + own.system


@dataclass(frozen=True)
class SearchTime:
    """The time that a search has spent.

    Attributes:
        budget: seconds.
        before: the seconds before the proof.
        proof: the seconds of the proof.
        least: the least budget in which all setups are tried.
        untried: the number of setups that there was no time for.
        other_programs: the share of the processors that other programs used.
    """

    budget: float
    before: float
    proof: float
    least: float = 0.0
    untried: int = 0
    other_programs: float = 0.0


def deciding_changes(
    task: TuningTask, proof: Proof, names: Collection[str], spent: SearchTime, *, is_timed: bool
) -> Iterator[str]:
    """Yield the changes that would decide a proof.

    Args:
        task: the task of the search.
        proof: an undecided proof.
        names: the setups that may be better than float32.
        spent: the time of the search.
        is_timed: True if the times have to be decided too.
    """
    compared = [c for c in proof.comparisons if c.name in names and c.against == FLOAT32.name]
    losses = [c for c in compared if c.loss == "cannot tell"]
    times = [c for c in compared if is_timed and not is_time_decided(c, proof.tolerance)]
    if times and spent.other_programs > _BUSY:
        yield f"a quieter machine: other programs used {spent.other_programs:.0%} of the processors"
    factor_losses = max((_factor(c.difference, proof.tolerance) for c in losses), default=1.0)
    edges = 1.0, 1 - proof.tolerance
    factor_times = max((min(_factor(c.ratio, edge) for edge in edges) for c in times), default=1.0)
    if task.is_training or not losses or spent.untried:
        budget = _sufficient_budget(task, proof, factor_losses, factor_times, spent)
        if budget is not None:
            yield f"a budget of about {duration_text(budget)}, if times and losses vary as they did here"
    batches = proof.seeds * factor_losses
    if not task.is_training and losses and batches <= MOST_BATCHES and proof.seeds < MOST_BATCHES:
        yield f"about {plural(math.ceil(batches), 'batch', 'batches')} instead of {proof.seeds}"
    widest = max((c.difference.high for c in losses), default=math.inf)
    if widest < 1:
        yield f"a tolerance of {widest:.2%} or more, within which the {task.words.value} is that of float32"


def _factor(interval: Interval, edge: float) -> float:
    """Return how many times as many trials make an interval so narrow that it excludes `edge`.

    The width of an interval is inversely proportional to the square root of the number of trials.
    """
    half = max(interval.high - interval.middle, interval.middle - interval.low)
    if not math.isfinite(half):
        return 1.0  # there are too few trials for an interval; the first look may suffice
    distance = abs(interval.middle - edge)
    return max(1.0, (half / distance) ** 2) if distance else math.inf


def _sufficient_budget(
    task: TuningTask, proof: Proof, factor_losses: float, factor_times: float, spent: SearchTime
) -> float | None:
    """Return a budget with enough rounds of the longest trainings, or of passes; None if none is enough."""
    steps = max(1, proof.steps)
    if task.is_training:
        longest = task.steps[1]
        rounds = max(proof.seeds * factor_losses, proof.seeds * factor_times * steps / longest)
        seconds = spent.proof / max(1, proof.seeds) / steps * longest
    else:
        rounds, seconds = steps * factor_times, spent.proof / steps
    look = next((look for look in task.looks if look >= rounds), None)
    if look is None:
        return None
    growth = 1 + spent.untried / len(proof.figures)
    budget = max(spent.before + look * seconds * growth, spent.least)
    return budget if budget > spent.budget else None


def duration_text(seconds: float) -> str:
    """Return a time in the form that the command line takes, in whole minutes or seconds, rounded up."""
    whole = math.ceil(seconds)
    return f"{whole}s" if whole <= 90 else f"{math.ceil(seconds / 60)}m"
