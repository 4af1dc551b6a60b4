"""Runs several setups side by side on the same batches, until their metrics and times can be told apart.

Invariants:
- what is compared is paired: a difference of metrics is between two runs of one batch, and a ratio of times between two
  runs of one batch right after each other;
- a difference is a share of the mean of the other's metric over all batches, because a metric may be 0 for one batch;
- the metric of a batch is taken once. Later passes over the batches add times alone; the intervals of these hold
  together with 95% at all passes in `PASSES`;
- a setup that fails for one batch, by a metric that is not finite or an error, is worse;
- the deadline is looked at before every batch, and Ctrl-C ends the runs; what was found until then is returned.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final

from precast.errors import TuningError
from precast.tuning.intervals import Interval, mean_interval, median_interval
from precast.tuning.proof import (
    Comparison,
    Figures,
    Proof,
    Verdict,
    is_time_known,
    verdict_of,
)
from precast.tuning.serving import Serving
from precast.tuning.training import FLOAT32, Setup, Workload

__all__ = ["LEAST_BATCHES", "PASSES", "prove_runs"]

PASSES: Final = (1, 2, 4, 8, 16)
"""After so many passes over the batches the times are looked at."""
LEAST_BATCHES: Final = 3
"""So many batches are needed for an interval that says anything."""


def prove_runs(
    workload: Workload,
    setups: Sequence[Setup],
    *,
    tolerance: float,
    deadline: float = math.inf,
    timed: bool = False,
    known: dict[str, Figures] | None = None,
    told: Callable[[str, int], None] | None = None,
    begin: Callable[[Workload, Setup], Serving] = Serving,
) -> Proof:
    """Runs the setups beside float32.

    Args:
        workload: what is run.
        setups: all but float32, which is always there and comes first.
        tolerance: how large a relative difference of metrics does not count.
        deadline: on `time.monotonic`'s clock.
        timed: whether the times have to be told apart too.
        known: the figures of an earlier search, which count if all batches are in them.
        told: called before each pass with the names of the setups in it, and the pass's number.
        begin: makes the copy that runs under a setup.

    Raises:
        TuningError: the metric in float32 is not finite.
    """
    batches = len(workload.batches)
    everything = (FLOAT32, *setups)
    figures = known or {}
    if not known or len(known[FLOAT32.name].finals) < batches:
        figures = {setup.name: Figures(setup.name) for setup in everything}
    proof = Proof(figures, [], 0, len(figures[FLOAT32.name].finals), tolerance, "seeds")
    proof.steps = len(figures[FLOAT32.name].seconds) // batches
    running: list[Serving] = []
    try:
        for setup in everything:
            if not figures[setup.name].failure:
                running.append(begin(workload, setup))
                running[-1].run(0)  # the first run loads code and memory
        for number in range(proof.steps, PASSES[-1]):
            names = [serving.setup.name for serving in running]
            if told is not None:
                told(", ".join(names), number)
            if not _pass(running, number, proof, batches, deadline):
                proof.ended = "time"
                break
            proof.steps = number + 1
            running = [s for s in running if not figures[s.setup.name].failure]
            if proof.steps in PASSES and (not timed or _are_times_told_apart(proof, running)):
                proof.ended = "proven"
                break
    except KeyboardInterrupt:
        proof.ended = "interrupted"
    finally:
        for serving in running:
            serving.close()
    proof.comparisons = _comparisons(proof, [setup.name for setup in everything])
    return proof


def _pass(running: list[Serving], number: int, proof: Proof, batches: int, deadline: float) -> bool:
    """Runs each batch under all setups in turns; returns whether there was time for all of them."""
    for place in range(batches):
        if time.monotonic() > deadline:
            return False
        turn = (number + place) % len(running)
        values = {}
        for serving in (*running[turn:], *running[:turn]):
            values[serving.setup.name] = serving.run(place)
        for serving in running:
            _note(proof.figures[serving.setup.name], serving, values[serving.setup.name], number)
        if number == 0:
            proof.seeds = place + 1
    return True


def _note(found: Figures, serving: Serving, value: float, number: int) -> None:
    if serving.failure:
        if serving.setup is FLOAT32:
            raise TuningError(
                f"in float32 {serving.failure}: no precision can be compared with it. Find out why first, for example "
                "with precast.monitor(model)."
            )
        found.failure = serving.failure
        return
    if number == 0:
        found.finals.append(value)
        found.curves = [list(found.finals)]
    found.seconds.append(serving.seconds[-1])


def _are_times_told_apart(proof: Proof, running: list[Serving]) -> bool:
    """Whether nothing is open between the times of any two setups, but of one whose metric is not as good."""
    found = _comparisons(proof, [serving.setup.name for serving in running])
    return all(
        (c.time != "cannot tell" and is_time_known(c, proof.tolerance)) or not c.is_as_good
        for c in found
    )


def _comparisons(proof: Proof, names: list[str]) -> list[Comparison]:
    """Each setup beside those before it."""
    return [
        _compare(proof, name, against)
        for place, name in enumerate(names)
        for against in names[:place]
    ]


def _compare(proof: Proof, name: str, against: str) -> Comparison:
    mine, theirs = proof.figures[name], proof.figures[against]
    unknown = Interval(-math.inf, math.nan, math.inf)
    if mine.failure or theirs.failure:
        why = mine.failure or f"{against} fails: {theirs.failure}"
        verdict: Verdict = "worse" if mine.failure else "better"
        return Comparison(name, against, verdict, unknown, "cannot tell", unknown, proof.seeds, why)
    # Ctrl-C may have come while the last batch was written down.
    pairs = list(zip(mine.finals, theirs.finals, strict=False))
    mean = statistics.fmean(abs(value) for _, value in pairs) if pairs else 1.0
    difference = mean_interval([(a - b) / (mean or 1.0) for a, b in pairs])
    ratios = [a / b for a, b in zip(mine.seconds, theirs.seconds, strict=False) if b > 0]
    ratio = median_interval(ratios, looks=len(PASSES))
    return Comparison(
        name,
        against,
        verdict_of(difference, proof.tolerance),
        difference,
        verdict_of(Interval(ratio.low - 1, ratio.middle - 1, ratio.high - 1), proof.tolerance),
        ratio,
        len(pairs),
    )
