"""Times works in turns: each runs once in every round, so that what else the machine does falls on all of them alike.

Invariants:

- what is compared is timed in the same rounds, in an order that changes from round to round;
- a work that is shorter than the clock can tell runs several times in each turn.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from time import perf_counter
from typing import Final, NamedTuple, TypeVar

__all__ = ["Figure", "in_turns"]

_SHORTEST: Final = 200e-6
"""Seconds that a turn takes at least, about a thousand times what reading the clock takes."""
_MOST_REPEATS: Final = 64
_FEWEST_ROUNDS: Final = 3
K = TypeVar("K", bound=Hashable)


class Figure(NamedTuple):
    """A time that was measured several times.

    Attributes:
        seconds: the median.
        spread: half of the distance between the quartiles, in seconds.
    """

    seconds: float
    spread: float = 0.0

    def times(self, count: int) -> Figure:
        """That of `count` such works."""
        return Figure(self.seconds * count, self.spread * count)

    def plus(self, other: Figure) -> Figure:
        """That of both; independent spreads add as squares do."""
        return Figure(self.seconds + other.seconds, (self.spread**2 + other.spread**2) ** 0.5)


def in_turns(
    works: Mapping[K, Callable[[], float | None]], rounds: int, deadline: float = math.inf
) -> dict[K, Figure]:
    """Times each work `rounds` times, in turns.

    Args:
        works: what is timed. A work that prepares something gives the seconds that count; one that gives None is timed
            as a whole.
        rounds: how many turns each gets.
        deadline: on `time.monotonic`'s clock; past it, each gets no more turns than 3.
    """
    repeats = {key: _repeats(work) for key, work in works.items()}
    seconds: dict[K, list[float]] = {key: [] for key in works}
    keys = list(works)
    for turn in range(rounds):
        if turn >= _FEWEST_ROUNDS and time.monotonic() > deadline:
            break
        for key in keys[turn % len(keys) :] + keys[: turn % len(keys)] if keys else ():
            seconds[key].append(_timed(works[key], repeats[key]))
    return {key: _figure(of_it) for key, of_it in seconds.items()}


def _repeats(work: Callable[[], float | None]) -> int:
    _timed(work, 1)  # the first call loads code and memory
    once = _timed(work, 1)
    return max(1, min(_MOST_REPEATS, round(_SHORTEST / max(once, 1e-7))))


def _timed(work: Callable[[], float | None], repeats: int) -> float:
    told: float | None = None
    start = perf_counter()
    for _ in range(repeats):
        seconds = work()
        if seconds is not None:
            told = (told or 0.0) + seconds
    whole = perf_counter() - start
    return (whole if told is None else told) / repeats


def _figure(seconds: list[float]) -> Figure:
    if len(seconds) < 2:
        return Figure(seconds[0])
    low, _, high = statistics.quantiles(seconds, n=4)
    return Figure(statistics.median(seconds), (high - low) / 2)
