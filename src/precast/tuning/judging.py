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
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from precast._internal.display import size
from precast.tuning.chooser import Objective
from precast.tuning.intervals import Interval
from precast.tuning.proof import Proof, SetupComparison, is_time_decided
from precast.tuning.setups import FLOAT32, MOST_BATCHES, Setup
from precast.tuning.words import TRAINING, TaskWords

__all__ = ["Judge", "OtherPrograms", "SearchTime", "deciding_changes", "duration_text"]

_BUDGETS: Final = tuple(
    60.0 * minutes
    for minutes in (1, 2, 3, 5, 8, 10, 15, 20, 30, 45, 60, 90, 120, 180, 240, 360, 480, 720)
)
_BUSY: Final = 0.1
"""The share of the processors that other programs use on a machine that is not quiet."""


@dataclass(frozen=True)
class Judge:
    """Finds the answer of a proof.

    Attributes:
        objective: the quantity to minimize.
        bases: the names of the setups of the base policy.
        words: the words of the task.
    """

    objective: Objective
    bases: Collection[str]
    words: TaskWords = TRAINING

    def best(self, proof: Proof, setups: Iterable[Setup]) -> tuple[Setup, str]:
        """Return the answer, and a clause on each of the other setups."""
        reasons: dict[str, str] = {}
        able = []
        for setup in setups:
            reasons[setup.name] = self.refusal(proof, setup)
            if not reasons[setup.name]:
                able.append(setup)
        reference = FLOAT32
        for setup in able:
            if setup.name in self.bases:
                reasons[setup.name], is_better = self.gain(proof, setup.name, reference.name)
                if is_better:
                    reference = setup
        winners = []
        for setup in able:
            if setup.name not in self.bases:
                reasons[setup.name], is_better = self.gain(proof, setup.name, reference.name)
                compared = proof.comparison(setup.name, reference.name)
                if compared.loss == "worse":
                    reasons[setup.name] = self._loss_text(compared, proof.tolerance)
                elif is_better:
                    winners.append(setup)
        best = min(winners, key=lambda setup: self._spent(proof, setup), default=reference)
        reasons |= self._slower(proof, best, reasons)
        return best, "; ".join(reasons.values())

    def undecided(self, proof: Proof, setups: Iterable[Setup]) -> list[str]:
        """Return the names of the setups that may be better than float32."""
        names = []
        for setup in setups:
            compared = proof.comparison(setup.name, FLOAT32.name)
            if compared.because or compared.loss == "worse" or setup.silent:
                continue
            if self.objective == "memory":
                may_be_better = self._bytes(proof, setup.name) < self._bytes(proof, FLOAT32.name)
                is_decided = compared.is_as_good
            else:
                may_be_better = compared.ratio.low <= 1 - proof.tolerance
                is_decided = compared.is_as_good and compared.ratio.high < 1
            if may_be_better and not is_decided:
                names.append(setup.name)
        return names

    def refusal(self, proof: Proof, setup: Setup) -> str:
        """Return why a setup cannot be the answer; "" if it can."""
        quality = proof.comparison(setup.name, FLOAT32.name)
        if not quality.is_as_good:
            return self._loss_text(quality, proof.tolerance)
        if setup.silent:
            return (
                f"under {setup.name} the gradient of {setup.silent} is zero, so it is not trained"
            )
        return ""

    def gain(self, proof: Proof, name: str, against: str) -> tuple[str, bool]:
        """Return a clause on how a setup compares at the objective, and True if it is better for certain."""
        if self.objective == "memory":
            mine, theirs = self._bytes(proof, name), self._bytes(proof, against)
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

    def _bytes(self, proof: Proof, name: str) -> int:
        return proof.figures[name].kept_bytes

    def _spent(self, proof: Proof, setup: Setup) -> float:
        """Return the time or memory of a setup, by which setups are ordered."""
        if self.objective == "memory":
            return float(self._bytes(proof, setup.name))
        return proof.comparison(setup.name, FLOAT32.name).ratio.middle

    def _slower(self, proof: Proof, best: Setup, names: Collection[str]) -> dict[str, str]:
        """Return clauses on setups whose loss is undecided because they were too slow to get more rounds."""
        texts: dict[str, str] = {}
        for compared in proof.comparisons if self.objective == "time" else ():
            pair = (compared.name, compared.against)
            if best.name not in pair:
                continue
            [name] = {*pair} - {best.name, FLOAT32.name} or {""}
            if name not in names:
                continue
            if proof.comparison(name, FLOAT32.name).loss != "cannot tell":
                continue
            text, is_better = self.gain(proof, *pair)
            if compared.name == name and compared.ratio.low > 1:
                texts[name] = text
            elif compared.name == best.name and is_better:
                texts[name] = f"{name} is slower: {text}"
        return texts

    def _loss_text(self, compared: SetupComparison, tolerance: float) -> str:
        """Return why the loss of a setup is not accepted."""
        name, against, value = compared.name, compared.against, self.words.value
        if compared.because:
            return f"{name} fails ({compared.because})"
        difference = compared.difference
        if not math.isfinite(difference.high):
            return f"too few {self.words.trials} were compared to tell the {value} of {name}"
        figures = f"by {difference.low:+.2%} to {difference.high:+.2%}"
        if compared.loss == "worse":
            return f"the {value} of {name} is worse than that of {against} {figures}"
        return (
            f"could not tell whether the {value} of {name} is that of {against} within {tolerance:.2%}: it differs "
            f"{figures}"
        )


# --- changes that would decide a proof ---


class OtherPrograms:
    """The processor time that other programs use, from the creation of this object; Linux alone counts it."""

    def __init__(self) -> None:
        self._first = _processor_times()

    def share(self) -> float | None:
        """Return the share of the time of all processors that other programs used; None where it is not counted."""
        current, first = _processor_times(), self._first
        if current is None or first is None or current[1] <= first[1]:
            return None
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
    """The time that a search has spent, and how it would spend more.

    Attributes:
        budget: seconds.
        before: the seconds before the proof.
        proof: the seconds of the proof.
        steps_for: returns the steps of a training for which there is time in so many seconds; 0 if too few.
        untried: the number of setups that there was no time for.
        other_programs: the share of the processors that other programs used.
    """

    budget: float
    before: float
    proof: float
    steps_for: Callable[[float], int]
    untried: int = 0
    other_programs: float | None = None


def deciding_changes(
    proof: Proof,
    names: Collection[str],
    spent: SearchTime,
    looks: Sequence[int],
    words: TaskWords,
    *,
    is_timed: bool,
) -> list[str]:
    """Return the changes that would decide a proof, a phrase for each.

    Args:
        proof: an undecided proof.
        names: the setups that may be better than float32.
        spent: the time of the search.
        looks: the numbers of rounds after which intervals are computed.
        words: the words of the task.
        is_timed: True if the times have to be decided too.
    """
    compared = [c for c in proof.comparisons if c.name in names and c.against == FLOAT32.name]
    losses = [c for c in compared if c.loss == "cannot tell"]
    times = [c for c in compared if is_timed and not is_time_decided(c, proof.tolerance)]
    phrases = []
    if times and spent.other_programs is not None and spent.other_programs > _BUSY:
        phrases.append(
            f"a quieter machine: other programs used {spent.other_programs:.0%} of the processors, and the times of a "
            f"{words.run} in float32 varied by {proof.figures[FLOAT32.name].time_spread:.0%}"
        )
    factor_losses = max((_factor(c.difference, proof.tolerance) for c in losses), default=1.0)
    edges = 1.0, 1 - proof.tolerance
    factor_times = max((min(_factor(c.ratio, edge) for edge in edges) for c in times), default=1.0)
    is_training = words is TRAINING
    if is_training or not losses or spent.untried:
        budget = _sufficient_budget(
            proof, factor_losses, factor_times, spent, looks, is_training=is_training
        )
        if budget is not None:
            phrases.append(
                f"a budget of about {duration_text(budget)}, if times and losses vary as they did here"
            )
    batches = proof.seeds * factor_losses
    if not is_training and losses and batches <= MOST_BATCHES and proof.seeds < MOST_BATCHES:
        phrases.append(
            f"about {size(math.ceil(batches), 'batch', 'batches')} instead of {proof.seeds}"
        )
    widest = max((c.difference.high for c in losses), default=math.inf)
    if widest < 1:
        phrases.append(
            f"a tolerance of {widest:.2%} or more, within which the {words.value} is that of float32"
        )
    return phrases


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
    proof: Proof,
    factor_losses: float,
    factor_times: float,
    spent: SearchTime,
    looks: Sequence[int],
    *,
    is_training: bool,
) -> float | None:
    """Return the least usual budget with enough rounds; None if none is enough."""
    setups = len(proof.figures)
    growth = (setups + spent.untried) / setups
    if is_training:
        rounds = proof.seeds * factor_losses
        timed_steps = proof.seeds * max(1, proof.steps) * factor_times
        seconds = spent.proof / max(1, proof.seeds) / max(1, proof.steps) * growth
    else:
        rounds = timed_steps = max(1, proof.steps) * factor_times
        seconds = spent.proof / max(1, proof.steps) * growth
    least = next((look for look in looks if look >= rounds), None)
    for budget in _BUDGETS if least is not None else ():
        remaining = budget - spent.before
        steps = spent.steps_for(remaining)
        if budget <= spent.budget or steps < 1:
            continue
        needed = max(least or 0, timed_steps / steps)
        if needed <= looks[-1] and remaining >= needed * steps * seconds:
            return budget
    return None


def duration_text(seconds: float) -> str:
    """Return a time in the form that the command line takes, in whole minutes or seconds, rounded up."""
    whole = math.ceil(seconds)
    return f"{whole}s" if whole <= 90 else f"{math.ceil(seconds / 60)}m"
