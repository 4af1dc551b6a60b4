"""Times several variants of the same work in turns, so that a noisy machine disturbs all of them alike.

A ratio or difference is taken within each round, between neighbours in time, and its median reported: the load of the
machine cancels out of it, as it does not out of two medians taken apart.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Comparison", "Variant", "compare", "interquartile_range"]


@dataclass(frozen=True)
class Variant:
    """One way to do the work: what to do before each round (not timed), the work, what to do after.

    `finish` waits for work that goes on after its call, as on a GPU; the clock stops after it.
    """

    work: Callable[[], object]
    before: Callable[[], object] = lambda: None
    after: Callable[[], object] = lambda: None
    finish: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Comparison:
    """Seconds a call for each variant, one number a round, the rounds in the same order for all."""

    rounds: Mapping[str, Sequence[float]]

    def median(self, name: str) -> float:
        """Median seconds a call."""
        return statistics.median(self.rounds[name])

    def spread(self, name: str) -> float:
        """Interquartile range of the seconds a call."""
        return interquartile_range(self.rounds[name])

    def ratio(self, name: str, to: str) -> tuple[float, float]:
        """Median and interquartile range of the ratio of two variants within a round."""
        pairs = zip(self.rounds[name], self.rounds[to], strict=True)
        ratios = [mine / other for mine, other in pairs]
        return statistics.median(ratios), interquartile_range(ratios)

    def difference(self, name: str, to: str) -> tuple[float, float]:
        """Median and interquartile range of the difference of two variants within a round, seconds."""
        pairs = zip(self.rounds[name], self.rounds[to], strict=True)
        differences = [mine - other for mine, other in pairs]
        return statistics.median(differences), interquartile_range(differences)

    def to_dict(self) -> dict[str, Any]:
        """Median and spread of each variant, microseconds, for JSON."""
        return {
            name: {"median_us": self.median(name) * 1e6, "iqr_us": self.spread(name) * 1e6}
            for name in self.rounds
        }


def compare(
    variants: Mapping[str, Variant], *, rounds: int, calls: int, untimed: int | None = None
) -> Comparison:
    """Runs `rounds` rounds; in each every variant in turn makes `untimed` calls, then `calls` timed ones.

    Without `untimed`: a tenth of `calls`, one at least.
    """
    warm_up = max(1, calls // 10) if untimed is None else untimed
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for turn in range(rounds):
            names = list(variants)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                seconds[name].append(_time(variants[name], calls, warm_up))
    finally:
        if collecting:
            gc.enable()
    return Comparison(seconds)


def _time(variant: Variant, calls: int, warm_up: int) -> float:
    variant.before()
    try:
        work = variant.work
        for _ in range(warm_up):
            work()
        variant.finish()
        start = time.perf_counter()
        for _ in range(calls):
            work()
        variant.finish()
        return (time.perf_counter() - start) / calls
    finally:
        variant.after()


def interquartile_range(values: Sequence[float]) -> float:
    """Return the distance between the quartiles; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4)
    return high - low
