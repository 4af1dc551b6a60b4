"""Paired comparison of setups, whose copies are trained or run in turns with the same seeds and batches.

Invariants:
- differences of losses are between two trainings with the same seed, or two runs of the same batch. Ratios of times are
  between two consecutive steps or runs;
- intervals are computed only after fixed numbers of rounds (`TuningTask.looks`). With a probability of 95% all of them
  are right, so it is allowed to stop at the first one that is decisive;
- a setup that is proven to be worse than float32, or slower than the fastest one if time is the objective, gets no more
  rounds;
- a setup that raises an error or has a loss that is not finite is worse;
- the deadline is checked before every step, and Ctrl-C ends the proof. The complete rounds are returned.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Final, Literal

from precast._internal.display import dtype_name
from precast.errors import TuningError
from precast.tuning.options import import_scipy
from precast.tuning.setups import FLOAT32, Setup
from precast.tuning.tasks import ModelTrial, TuningTask

__all__ = ["CONFIDENCE", "UNKNOWN", "ComparisonOutcome", "Interval", "Proof", "SetupComparison"]
__all__ += ["SetupFigures", "compare", "is_time_decided", "mean_interval", "median_interval"]
__all__ += ["outcome_of", "prove"]

CONFIDENCE: Final = 0.95


@dataclass(frozen=True)
class Interval:
    """An estimate and the ends of its interval, which are infinite without measurements."""

    low: float
    middle: float
    high: float


UNKNOWN: Final = Interval(-math.inf, math.nan, math.inf)


def mean_interval(numbers: Sequence[float], *, looks: int = 1) -> Interval:
    """Return the interval of the mean of the distribution from which these numbers are drawn."""
    count = len(numbers)
    if count < 2:
        return _unbounded_interval(numbers)
    mean = statistics.fmean(numbers)
    half = _standard_errors(looks, count) * statistics.stdev(numbers) / math.sqrt(count)
    return Interval(mean - half, mean, mean + half)


def median_interval(numbers: Sequence[float], *, looks: int = 1) -> Interval:
    """Return the interval of the median. Its ends are two of the numbers."""
    ordered, rank = sorted(numbers), _rank(looks, len(numbers))
    if rank == 0:
        return _unbounded_interval(ordered)
    return Interval(ordered[rank - 1], statistics.median(ordered), ordered[-rank])


def _unbounded_interval(numbers: Sequence[float]) -> Interval:
    return Interval(-math.inf, statistics.median(numbers) if numbers else math.nan, math.inf)


@functools.cache
def _standard_errors(looks: int, count: int) -> float:
    """Return half of the width of the interval of a mean, in standard errors."""
    return float(import_scipy("special").stdtrit(count - 1, 1 - (1 - CONFIDENCE) / looks / 2))


@functools.cache
def _rank(looks: int, count: int) -> int:
    """Return the rank of the interval's ends, from below and from above; 0 if there are too few numbers."""
    risk = (1 - CONFIDENCE) / looks
    rank = 0
    while rank < count / 2 and import_scipy("special").bdtr(rank, count, 0.5) <= risk / 2:
        rank += 1
    return rank


ComparisonOutcome = Literal["better", "equal", "worse", "cannot tell"]


@dataclass
class SetupFigures:
    """The measurements of one setup.

    Attributes:
        finals: the final loss of each seed, or the metric of each batch.
        seconds: the times of steps. Those with the same index in two setups were consecutive.
        failure: why the setup cannot run; empty if it can.
        kept_bytes: the bytes that autograd keeps for the backward pass; in inference, those of weights and results.
    """

    name: str
    finals: list[float] = field(default_factory=list)
    curves: list[list[float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    failure: str = ""
    dtype: str = ""
    policy: str = ""
    kept_bytes: int = 0

    @property
    def median_seconds(self) -> float | None:
        """The median time of a step; None if none was timed."""
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def mean_final(self) -> float | None:
        """The mean of the final losses or metrics; None if there is none."""
        return statistics.fmean(self.finals) if self.finals else None


@dataclass(frozen=True)
class SetupComparison:
    """The comparison of one setup with another.

    Attributes:
        difference: the relative difference of the losses; below zero is better.
        ratio: the time of a step divided by that of the other setup.
        seeds: the number of pairs of losses.
        because: the reason for the outcome if it does not follow from the interval.
    """

    name: str
    against: str
    loss: ComparisonOutcome
    difference: Interval
    time: ComparisonOutcome
    ratio: Interval
    seeds: int
    because: str = ""

    @property
    def is_as_good(self) -> bool:
        """True if the loss is at least as good, within the tolerance."""
        return self.loss in ("better", "equal")


@dataclass
class Proof:
    """The figures of setups, float32 first, and the comparisons of each with each one before it.

    Attributes:
        steps: the steps of a training, or the passes of an inference.
        seeds: the number of pairs: of seeds, or of batches.
        ended: the reason for the end: all decided, no time left, no seeds left, or Ctrl-C.
    """

    figures: dict[str, SetupFigures]
    comparisons: list[SetupComparison]
    steps: int
    seeds: int
    tolerance: float
    ended: Literal["proven", "time", "seeds", "interrupted"]

    def comparison(self, name: str, against: str = FLOAT32.name) -> SetupComparison:
        """Return the comparison of a setup with one before it."""
        return next(c for c in self.comparisons if (c.name, c.against) == (name, against))


def prove(
    task: TuningTask,
    setups: Sequence[Setup],
    *,
    steps: int,
    tolerance: float,
    deadline: float = math.inf,
    timed: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Proof:
    """Compare setups with float32 and with each other until their losses and, if `timed`, their times are decided.

    Float32 comes first and is always compared. `steps` is the length of a training, `tolerance` the relative difference
    of losses that does not count, and the `deadline` on `time.monotonic`'s clock.
    """
    running = [FLOAT32, *setups]
    with closing(task):
        figures = {setup.name: _figures_of(task, setup) for setup in running}
        proof = Proof(figures, [], steps, 0, tolerance, "seeds")
        try:
            for number in range(task.looks[-1]):
                names = ", ".join(setup.name for setup in running)
                progress(f"round {number + 1}: {names}")
                if not _run_round(task, running, proof, number, deadline):
                    proof.ended = "time"
                    break
                proof.steps = steps if task.is_training else number + 1
                running = [setup for setup in running if not figures[setup.name].failure]
                if number + 1 in task.looks:
                    running, is_decided = _undecided_setups(proof, running, task, timed=timed)
                    if len(running) == 1 or is_decided:
                        proof.ended = "proven"
                        break
        except KeyboardInterrupt:
            proof.ended = "interrupted"
    pairs = itertools.combinations(figures, 2)
    proof.comparisons = [compare(proof, name, against, task) for against, name in pairs]
    return proof


def _figures_of(task: TuningTask, setup: Setup) -> SetupFigures:
    policy = "" if setup.policy is None else setup.policy.text
    figures = SetupFigures(setup.name, dtype=dtype_name(setup.dtype), policy=policy)
    try:
        figures.kept_bytes = task.needed_bytes(setup)
    except Exception as error:  # the trials of the setup will report it
        if setup is FLOAT32 or isinstance(error, TuningError):
            raise
    return figures


def _run_round(
    task: TuningTask, setups: Sequence[Setup], proof: Proof, number: int, deadline: float
) -> bool:
    """Run one round of all setups, step by step in turns. Return False if the time was not sufficient."""
    trials: list[ModelTrial] = []
    try:
        trials += (task.open(setup, number) for setup in setups)
        length = proof.steps if task.is_training else len(task.workload.batches)
        for place in range(length):
            if time.monotonic() > deadline:
                if not task.is_training:  # the batches before this one are complete
                    _add_figures(task, trials, number, proof)
                return False
            turn = (number + place) % len(trials)
            for trial in (*trials[turn:], *trials[:turn]):
                trial.run(place)
        _add_figures(task, trials, number, proof)
    finally:
        for trial in trials:
            task.release(trial)
    return True


def _add_figures(task: TuningTask, trials: Sequence[ModelTrial], number: int, proof: Proof) -> None:
    """Add the results of a round. For inference, only the first round adds metrics."""
    adds_values = task.is_training or number == 0
    for trial, values in [(trial, trial.values()) for trial in trials]:
        figures = proof.figures[trial.setup.name]
        wrong = [value for value in values if not math.isfinite(value)]
        figures.failure = trial.failure or (f"its loss is {wrong[0]}" if wrong else "")
        if figures.failure and trial.setup is FLOAT32:
            raise TuningError(
                f"float32 fails: {figures.failure}. No precision can be compared with it. Find the cause first, for "
                "example with precast.monitor(model)."
            )
        if adds_values:
            figures.curves.append(list(trial.losses))
        if not figures.failure:
            figures.finals += values if adds_values else []
            figures.seconds += trial.seconds[task.warmup :]
    proof.seeds = len(proof.figures[FLOAT32.name].finals)


def _undecided_setups(
    proof: Proof, setups: Sequence[Setup], task: TuningTask, *, timed: bool
) -> tuple[list[Setup], bool]:
    """Return float32 and the setups that may be the best one, and True if nothing is undecided about them.

    If `timed`, each setup is compared with the fastest one that may be as good as float32. More passes of an inference
    decide times only.
    """
    against_float32 = {s.name: compare(proof, s.name, FLOAT32.name, task) for s in setups[1:]}
    possible = [s for s in setups if s is FLOAT32 or against_float32[s.name].loss != "worse"]
    undecided = {
        name
        for name, compared in against_float32.items()
        if task.is_training and compared.loss == "cannot tell"
    }
    if timed:
        ratios = {name: compared.ratio.middle for name, compared in against_float32.items()}
        ratios = {name: ratio for name, ratio in ratios.items() if not math.isnan(ratio)}
        fastest = min(possible, key=lambda s: ratios.get(s.name, 1.0 if s is FLOAT32 else math.inf))
        behind = [compare(proof, s.name, fastest.name, task) for s in possible if s is not fastest]
        slower = {compared.name for compared in behind if compared.ratio.low > 1}
        possible = [setup for setup in possible if setup is FLOAT32 or setup.name not in slower]
        undecided -= slower
        undecided |= {
            c.name
            for c in behind
            if c.name not in slower
            if c.time == "cannot tell" or not is_time_decided(c, proof.tolerance)
        }
    return possible, not undecided & {setup.name for setup in possible}


def compare(proof: Proof, name: str, against: str, task: TuningTask) -> SetupComparison:
    """Compare one setup with another, in either order."""
    figures, other_figures = proof.figures[name], proof.figures[against]
    if figures.failure or other_figures.failure:
        why = figures.failure or f"{against} fails: {other_figures.failure}"
        outcome: ComparisonOutcome = "worse" if figures.failure else "better"
        return SetupComparison(
            name, against, outcome, UNKNOWN, "cannot tell", UNKNOWN, proof.seeds, why
        )
    # Ctrl-C may interrupt the recording of a round, so the lists may differ in length.
    pairs = list(zip(figures.finals, other_figures.finals, strict=False))
    scale = statistics.fmean([abs(other) for _, other in pairs] or [1.0]) or 1.0
    differences = [(value - other) / scale for value, other in pairs]
    looks = len(task.looks)
    difference = mean_interval(differences, looks=looks if task.is_training else 1)
    times = zip(figures.seconds, other_figures.seconds, strict=False)
    ratio = median_interval([a / b for a, b in times if b > 0], looks=looks)
    return SetupComparison(
        name,
        against,
        outcome_of(difference, proof.tolerance),
        difference,
        outcome_of(Interval(ratio.low - 1, ratio.middle - 1, ratio.high - 1), proof.tolerance),
        ratio,
        len(pairs),
    )


def is_time_decided(compared: SetupComparison, tolerance: float) -> bool:
    """Return True if a setup is proven to be faster than the other, or not faster by more than the tolerance."""
    return compared.ratio.high < 1 or compared.ratio.low > 1 - tolerance


def outcome_of(difference: Interval, tolerance: float) -> ComparisonOutcome:
    """Return the outcome of an interval of relative differences, where smaller is better.

    "equal" is at least as good, within the tolerance. It may be better, but this is not proven.
    """
    if difference.high < -tolerance:
        return "better"
    if difference.low > tolerance:
        return "worse"
    return "equal" if difference.high <= tolerance else "cannot tell"
