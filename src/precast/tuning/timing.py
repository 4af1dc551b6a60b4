"""Timing of functions in turns, so that other work of the machine falls on all of them alike.

Invariants:
- functions that are compared are timed in the same rounds, in an order that changes from round to round;
- a function that is shorter than the clock can resolve runs several times in each turn.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from time import perf_counter
from typing import Final, NamedTuple, TypeVar

__all__ = ["Timing", "time_in_turns"]

_SHORTEST: Final = 200e-6
"""The least seconds of a turn, about a thousand times what reading the clock takes."""
_MOST_REPEATS: Final = 64
_FEWEST_ROUNDS: Final = 3
_Key = TypeVar("_Key", bound=Hashable)


class Timing(NamedTuple):
    """A time that was measured several times.

    Attributes:
        seconds: the median.
        spread: half of the distance between the quartiles, in seconds.
    """

    seconds: float
    spread: float = 0.0

    def times(self, count: int) -> Timing:
        """Return the time of `count` repetitions."""
        return Timing(self.seconds * count, self.spread * count)

    def plus(self, other: Timing) -> Timing:
        """Return the sum of both; independent spreads add as squares do."""
        return Timing(self.seconds + other.seconds, math.hypot(self.spread, other.spread))


def time_in_turns(
    functions: Mapping[_Key, Callable[[], float | None]], rounds: int, deadline: float = math.inf
) -> dict[_Key, Timing]:
    """Time each function `rounds` times, in turns.

    Args:
        functions: the functions. One that prepares something returns the seconds that count; one that returns None is
            timed as a whole.
        rounds: the number of turns of each.
        deadline: on `time.monotonic`'s clock; after it, each gets only the fewest turns.
    """
    repeats = {key: _repeats(function) for key, function in functions.items()}
    seconds: dict[_Key, list[float]] = {key: [] for key in functions}
    keys = list(functions)
    for turn in range(rounds):
        if turn >= _FEWEST_ROUNDS and time.monotonic() > deadline:
            break
        for key in keys[turn % len(keys) :] + keys[: turn % len(keys)] if keys else ():
            seconds[key].append(_time(functions[key], repeats[key]))
    return {key: _timing(times) for key, times in seconds.items()}


def _repeats(function: Callable[[], float | None]) -> int:
    _time(function, 1)  # the first call loads code and memory
    once = _time(function, 1)
    return max(1, min(_MOST_REPEATS, round(_SHORTEST / max(once, 1e-7))))


def _time(function: Callable[[], float | None], repeats: int) -> float:
    returned: float | None = None
    start = perf_counter()
    for _ in range(repeats):
        seconds = function()
        if seconds is not None:
            returned = (returned or 0.0) + seconds
    whole = perf_counter() - start
    return (whole if returned is None else returned) / repeats


def _timing(seconds: list[float]) -> Timing:
    if len(seconds) < 2:
        return Timing(seconds[0])
    low, _, high = statistics.quantiles(seconds, n=4)
    return Timing(statistics.median(seconds), (high - low) / 2)
