"""Trains several setups side by side, from the same seeds on the same batches, until their losses can be told apart.

Invariants:
- what is compared is paired: a difference is between two trainings with one seed, a ratio of times between two steps
  that ran right after each other;
- seeds are added at the fixed counts `LOOKS`, and the intervals at all of them hold together with 95%, so stopping as
  soon as one suffices does not make it wrong more often;
- a setup that trains worse than float32, or where times count is slower than the fastest, for certain, gets no more
  seeds; what it is compared by are the seeds that it has;
- a verdict is a statement about the interval and never about its middle; where the time ends first it is "cannot tell";
- a setup that fails in one training, by a loss that is not finite or an error, is worse;
- the deadline is looked at before every step, and Ctrl-C ends the trainings; what was found until then is returned.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from precast.errors import TuningError
from precast.tuning.intervals import Interval, mean_interval, median_interval
from precast.tuning.training import FLOAT32, Setup, Training, Workload

__all__ = [
    "LOOKS",
    "WARM",
    "Comparison",
    "Figures",
    "Proof",
    "Verdict",
    "compare",
    "is_time_known",
    "prove",
    "train_seed",
    "verdict_of",
]

LOOKS: Final = (3, 6, 12, 24)
"""After so many seeds the intervals are looked at."""
WARM: Final = 2
"""Steps at the beginning of a training whose times do not count."""

Verdict = Literal["better", "equal", "worse", "cannot tell"]


@dataclass
class Figures:
    """What was seen of one setup."""

    name: str
    finals: list[float] = field(default_factory=list)
    """The loss that is reached, or the metric, for each seed."""
    curves: list[list[float]] = field(default_factory=list)
    """The losses of all steps, for each seed."""
    seconds: list[float] = field(default_factory=list)
    """The times of steps, each beside those of the other setups in the same place."""
    failure: str = ""

    @property
    def median(self) -> float:
        """The median time of a step, in seconds."""
        return statistics.median(self.seconds) if self.seconds else math.nan

    @property
    def spread(self) -> tuple[float, float]:
        """The quartiles of the times of steps."""
        if len(self.seconds) < 2:
            return math.nan, math.nan
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return low, high


@dataclass(frozen=True)
class Comparison:
    """One setup beside another."""

    name: str
    against: str
    loss: Verdict
    """Whether the loss that is reached is better or worse by more than the tolerance, or equal within it."""
    difference: Interval
    """The loss's relative difference; below zero is better."""
    time: Verdict
    ratio: Interval
    """The time of a step, as a share of the other's."""
    seeds: int
    because: str = ""
    """Why it is worse, where that is no matter of an interval."""

    @property
    def is_as_good(self) -> bool:
        """Whether the loss is at least as good, within the tolerance."""
        return self.loss in ("better", "equal")


@dataclass
class Proof:
    """What trainings side by side have shown."""

    figures: dict[str, Figures]
    comparisons: list[Comparison]
    steps: int
    seeds: int
    tolerance: float
    ended: Literal["proven", "time", "seeds", "interrupted"]
    """Why no more seeds were trained: all is told apart, or the time or the seeds are used up."""

    def comparison(self, name: str, against: str) -> Comparison:
        """One setup beside another."""
        return next(c for c in self.comparisons if (c.name, c.against) == (name, against))


def prove(
    workload: Workload,
    setups: Sequence[Setup],
    *,
    steps: int,
    tolerance: float,
    deadline: float = math.inf,
    looks: Sequence[int] = LOOKS,
    timed: bool = False,
    known: dict[str, Figures] | None = None,
    told: Callable[[str, int], None] | None = None,
    begin: Callable[[Workload, Setup, int], Training] = Training,
    train: Callable[..., bool] | None = None,
) -> Proof:
    """Trains the setups beside float32 until their losses are told apart.

    Args:
        workload: what is trained.
        setups: all but float32, which is always there and comes first.
        steps: of each training.
        tolerance: how large a relative difference of losses does not count.
        deadline: on `time.monotonic`'s clock.
        looks: after how many seeds the differences are looked at.
        timed: whether the times of steps have to be told apart too.
        known: the figures of seeds that were trained before, with as many steps; the seeds after them follow.
        told: called before each seed with the names of the setups in it, and the seed's number.
        begin: makes the copy that is trained under a setup.
        train: takes the place of `train_seed`, as where seeds are trained elsewhere.

    Raises:
        TuningError: the training in float32 does not stay finite.
    """
    figures = known or {setup.name: Figures(setup.name) for setup in (FLOAT32, *setups)}
    before = len(figures[FLOAT32.name].finals)
    proof = Proof(figures, [], steps, before, tolerance, "seeds")
    running = [
        setup
        for setup in (FLOAT32, *setups)
        if not figures[setup.name].failure and len(figures[setup.name].finals) == before
    ]
    try:
        for seed in range(before, looks[-1]):
            if told is not None:
                told(", ".join(setup.name for setup in running), seed)
            if not (train or train_seed)(workload, running, seed, proof, deadline, begin=begin):
                proof.ended = "time"
                break
            proof.seeds += 1
            running = [setup for setup in running if not figures[setup.name].failure]
            if proof.seeds in looks:
                running, is_told_apart = _worth_more(proof, running, len(looks), timed=timed)
                if len(running) == 1 or is_told_apart:
                    proof.ended = "proven"
                    break
    except KeyboardInterrupt:
        proof.ended = "interrupted"
    proof.comparisons = _comparisons(proof, setups, len(looks))
    return proof


def train_seed(
    workload: Workload,
    setups: Sequence[Setup],
    seed: int,
    proof: Proof,
    deadline: float,
    *,
    begin: Callable[[Workload, Setup, int], Training] = Training,
) -> bool:
    """Trains all setups with one seed, step by step in turns; returns whether there was time for it.

    Args:
        workload: what is trained.
        setups: with float32 as the first.
        seed: the seed.
        proof: which gets the figures.
        deadline: on `time.monotonic`'s clock.
        begin: makes the copy that is trained under a setup.

    Raises:
        TuningError: the training in float32 does not stay finite.
    """
    trainings: list[Training] = []
    try:
        for setup in setups:
            trainings.append(begin(workload, setup, seed))
        for number in range(proof.steps):
            if time.monotonic() > deadline:
                return False
            turn = (number + seed) % len(trainings)
            for training in (*trainings[turn:], *trainings[:turn]):
                training.step()
        finals = [training.final() for training in trainings]
    finally:
        for training in trainings:
            training.close()
    for training, final in zip(trainings, finals, strict=True):
        found = proof.figures[training.setup.name]
        found.curves.append(training.losses)
        found.failure = training.failure or ("" if math.isfinite(final) else f"its loss is {final}")
        if found.failure and training.setup is FLOAT32:
            raise TuningError(
                f"the training in float32 fails already: {found.failure}. No precision can be compared with it; find "
                "out why first, for example with precast.monitor(model)."
            )
        if not found.failure:
            found.finals.append(final)
            found.seconds += training.seconds[WARM:]
    return True


def _worth_more(
    proof: Proof, setups: Sequence[Setup], looks: int, *, timed: bool
) -> tuple[list[Setup], bool]:
    """The setups that more seeds can tell something of, float32 among them; and whether they are all told apart.

    Where times count, each is compared with the fastest that may train as well as float32.
    """
    against_float32 = {s.name: compare(proof, s.name, FLOAT32.name, looks) for s in setups[1:]}
    left = [s for s in setups if s is FLOAT32 or against_float32[s.name].loss != "worse"]
    slower: set[str] = set()
    is_timed = True
    if timed:
        shares = {name: c.ratio.middle for name, c in against_float32.items()} | {FLOAT32.name: 1.0}
        first = min(left, key=lambda s: math.inf if math.isnan(shares[s.name]) else shares[s.name])
        behind = [compare(proof, s.name, first.name, looks) for s in left if s is not first]
        slower = {compared.name for compared in behind if compared.ratio.low > 1}
        is_timed = all(
            c.name in slower or (c.time != "cannot tell" and is_time_known(c, proof.tolerance))
            for c in behind
        )
        left = [setup for setup in left if setup is FLOAT32 or setup.name not in slower]
    is_told = all(against_float32[s.name].loss != "cannot tell" for s in left if s is not FLOAT32)
    return left, is_timed and is_told


def _comparisons(proof: Proof, setups: Sequence[Setup], looks: int) -> list[Comparison]:
    """Each setup beside those before it."""
    names = [FLOAT32.name, *(setup.name for setup in setups)]
    return [
        compare(proof, name, against, looks)
        for place, name in enumerate(names)
        for against in names[:place]
    ]


def compare(proof: Proof, name: str, against: str, looks: int) -> Comparison:
    """One setup beside another, in either order; `looks` is how often the proof is looked at."""
    mine, theirs = proof.figures[name], proof.figures[against]
    unknown = Interval(-math.inf, math.nan, math.inf)
    if mine.failure:
        return Comparison(
            name, against, "worse", unknown, "cannot tell", unknown, proof.seeds, mine.failure
        )
    if theirs.failure:
        why = f"{against} fails: {theirs.failure}"
        return Comparison(
            name, against, "better", unknown, "cannot tell", unknown, proof.seeds, why
        )
    # Ctrl-C may have come while the last seed was written down.
    pairs = list(zip(mine.finals, theirs.finals, strict=False))
    scale = max((abs(theirs) for _, theirs in pairs), default=1.0) * 1e-6 or 1.0
    differences = [(a - b) / max(abs(b), scale) for a, b in pairs]
    difference = mean_interval(differences, looks=looks)
    ratios = [a / b for a, b in zip(mine.seconds, theirs.seconds, strict=False)]
    ratio = median_interval(ratios, looks=looks)
    return Comparison(
        name,
        against,
        verdict_of(difference, proof.tolerance),
        difference,
        verdict_of(Interval(ratio.low - 1, ratio.middle - 1, ratio.high - 1), proof.tolerance),
        ratio,
        len(pairs),
    )


def is_time_known(compared: Comparison, tolerance: float) -> bool:
    """Return True if one setup is faster than the other for certain, or not by more than the tolerance."""
    return compared.ratio.high < 1 or compared.ratio.low > 1 - tolerance


def verdict_of(difference: Interval, tolerance: float) -> Verdict:
    """What an interval of relative differences says, where smaller is better.

    "equal" is at least as good within the tolerance: it may be better, but not by more than the tolerance for certain.
    """
    if difference.high < -tolerance:
        return "better"
    if difference.low > tolerance:
        return "worse"
    return "equal" if difference.high <= tolerance else "cannot tell"
