"""Conditions that would decide an undecided search: a quiet machine, a longer budget, more batches, a wider tolerance.

Invariants:

- each condition is computed from the intervals and times that were measured; one that would not help is not named;
- an interval of `n` trials becomes narrower as the square root of `n` grows, by which the trials to come are estimated.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from precast._internal.display import size
from precast.errors import TuningError
from precast.tuning.inference_proof import PASSES
from precast.tuning.intervals import Interval
from precast.tuning.proof import LOOKS, WARM, Comparison, Figures, Proof, is_time_known
from precast.tuning.training import FLOAT32, MOST_BATCHES
from precast.tuning.words import TRAINING, Words

__all__ = ["OtherPrograms", "SearchTime", "budget_text", "conditions", "refuse_too_small"]

_BUDGETS: Final = tuple(
    60.0 * minutes
    for minutes in (1, 2, 3, 5, 8, 10, 15, 20, 30, 45, 60, 90, 120, 180, 240, 360, 480, 720)
)
_QUIET_SPREAD: Final = 0.05
"""Quartiles of step times on an idle machine are within about this share of the median."""
_QUIET_SHARE: Final = 0.1


class OtherPrograms:
    """The processor time that other programs use, from when this is made; Linux alone counts it."""

    def __init__(self) -> None:
        self._first = _processor_times()

    def share(self) -> float | None:
        """Return the share of the time of all processors that other programs used; None where nothing counts it."""
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
        steps_for: the steps of a training for which there is time in so many seconds.
        untried: how many setups there was no time for.
        other_programs: the share of the processors that other programs used.
    """

    budget: float
    before: float
    proof: float
    steps_for: Callable[[float], int]
    untried: int = 0
    other_programs: float | None = None


def conditions(
    proof: Proof, names: Sequence[str], spent: SearchTime, words: Words, *, is_timed: bool
) -> list[str]:
    """Return the conditions that would decide whether these setups are better than float32, a phrase for each."""
    compared_setups = [
        compared
        for compared in proof.comparisons
        if compared.against == FLOAT32.name and compared.name in names
    ]
    losses = [c for c in compared_setups if c.loss == "cannot tell"]
    times = [c for c in compared_setups if is_timed and not is_time_known(c, proof.tolerance)]
    phrases = []
    if times:
        phrases += _quieter_machine(proof.figures[FLOAT32.name], spent.other_programs, words)
    find = _training_budget if words is TRAINING else _inference_budget
    budget = find(proof, losses, times, spent)
    if budget is not None:
        phrases.append(f"a budget of about {budget_text(budget)}, if all spreads as it did here")
    if words is not TRAINING and losses:
        phrases += _more_batches(losses, proof.tolerance)
    widest = max((c.difference.high for c in losses), default=math.inf)
    if losses and widest < 1:
        phrases.append(
            f"a tolerance of {widest:.2%} or more, within which the {words.value} is that of float32"
        )
    return phrases


def refuse_too_small(budget: float, least: float, seconds: float, words: Words) -> None:
    """Refuse a budget below the least one in which something can be compared.

    Args:
        budget: seconds.
        least: seconds, of the least one.
        seconds: of a step or run in float32.
        words: for the message.

    Raises:
        TuningError: it names the least budget.
    """
    if budget < least:
        raise TuningError(
            f"the budget of {budget:g} s is too small: a {words.run} of this model in float32 takes {seconds:.2g} s "
            f"now, so a comparison takes at least about {budget_text(least)}. Give a budget of {budget_text(least)} or "
            "more"
        )


def budget_text(seconds: float) -> str:
    """Return a time as the command line takes it, in whole minutes or seconds, rounded up."""
    whole = math.ceil(seconds)
    return f"{whole}s" if whole <= 90 else f"{math.ceil(seconds / 60)}m"


def _quieter_machine(float32: Figures, other_programs: float | None, words: Words) -> list[str]:
    low, high = float32.spread
    spread = (high - low) / 2 / float32.median if float32.seconds else math.nan
    is_busy = other_programs is not None and other_programs > _QUIET_SHARE
    if not (is_busy or spread > _QUIET_SPREAD):
        return []
    facts = []
    if spread > _QUIET_SPREAD:
        facts.append(f"the times of a {words.run} in float32 spread by {spread:.0%}")
    if other_programs is not None and is_busy:
        facts.append(f"other programs used {other_programs:.0%} of the processors")
    return [f"a quieter machine: {' and '.join(facts)}"]


def _training_budget(
    proof: Proof, losses: Iterable[Comparison], times: Iterable[Comparison], spent: SearchTime
) -> float | None:
    """Return the least usual budget in which enough seeds can be trained; None if none is enough."""
    trials_needed = proof.seeds * _times_as_many_for_losses(losses, proof.tolerance)
    seeds = next((look for look in LOOKS if look >= trials_needed), None)
    steps_timed = proof.seeds * (proof.steps - WARM)
    timed = steps_timed * _times_as_many_for_times(times, proof.tolerance)
    setups = len(proof.figures)
    each = spent.proof / max(1, proof.seeds) / proof.steps * (setups + spent.untried) / setups
    for budget in _BUDGETS:
        remaining = budget - spent.before
        steps = spent.steps_for(remaining)
        if budget <= spent.budget or seeds is None or steps <= WARM:
            continue
        trials = max(seeds, timed / (steps - WARM))
        if trials <= LOOKS[-1] and remaining >= trials * steps * each:
            return budget
    return None


def _inference_budget(
    proof: Proof, losses: Iterable[Comparison], times: Iterable[Comparison], spent: SearchTime
) -> float | None:
    """Return the least usual budget in which enough passes can be run; None if none is enough."""
    passes = max(1, proof.steps) * _times_as_many_for_times(times, proof.tolerance)
    if (list(losses) and not spent.untried) or passes > PASSES[-1]:
        return None
    setups = len(proof.figures)
    each = spent.proof / max(1, proof.steps) * (setups + spent.untried) / setups
    enough = (budget for budget in _BUDGETS if budget > spent.budget)
    return next((budget for budget in enough if budget - spent.before >= passes * each), None)


def _times_as_many_for_losses(compared: Iterable[Comparison], tolerance: float) -> float:
    """Return how many times as many trials would tell each loss from the tolerance."""
    return max((_times_as_many(c.difference, tolerance) for c in compared), default=1.0)


def _times_as_many_for_times(compared: Iterable[Comparison], tolerance: float) -> float:
    """Return how many times as many steps would tell whether each is faster, or by no more than the tolerance."""
    edges = 1.0, 1 - tolerance
    return max(
        (min(_times_as_many(c.ratio, edge) for edge in edges) for c in compared), default=1.0
    )


def _times_as_many(interval: Interval, edge: float) -> float:
    """Return how many times as many trials make an interval so narrow that it leaves out `edge`."""
    half = max(interval.high - interval.middle, interval.middle - interval.low)
    if not math.isfinite(half):
        return 1.0  # there were too few for any interval; the first look may do
    distance = abs(interval.middle - edge)
    return max(1.0, (half / distance) ** 2) if distance else math.inf


def _more_batches(losses: Iterable[Comparison], tolerance: float) -> list[str]:
    losses = list(losses)
    used = max(c.seeds for c in losses)
    trials_needed = used * _times_as_many_for_losses(losses, tolerance)
    if trials_needed > MOST_BATCHES or used >= MOST_BATCHES:
        return []
    return [f"about {size(math.ceil(trials_needed), 'batch', 'batches')} instead of {used}"]
