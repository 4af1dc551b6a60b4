"""Intervals that contain a true value with a given probability: of a mean, and of a median.

Invariants:
- both are exact and no approximation for many numbers: Student's for a mean of normal numbers, that of order statistics
  for the median of any numbers that are independent;
- who looks several times, and stops when content, gives `looks`: all intervals together then hold with `CONFIDENCE`.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from precast._internal.missing import missing_extra

__all__ = ["CONFIDENCE", "Interval", "mean_interval", "median_interval"]

CONFIDENCE: Final = 0.95


@dataclass(frozen=True)
class Interval:
    """A value, and between which numbers it lies; infinite ends where nothing is known."""

    low: float
    middle: float
    high: float


def mean_interval(numbers: Sequence[float], *, looks: int = 1) -> Interval:
    """Where the mean lies of which these numbers are a sample."""
    count = len(numbers)
    if count < 2:
        return _unknown(numbers)
    mean, spread = statistics.fmean(numbers), statistics.stdev(numbers)
    half = _student(looks, count) * spread / math.sqrt(count)
    return Interval(mean - half, mean, mean + half)


def median_interval(numbers: Sequence[float], *, looks: int = 1) -> Interval:
    """Where the median lies of which these numbers are a sample; the ends are numbers of the sample."""
    ordered = sorted(numbers)
    count = len(ordered)
    place = _place(looks, count)
    if place == 0:
        return _unknown(ordered)
    return Interval(ordered[place - 1], statistics.median(ordered), ordered[count - place])


def _unknown(numbers: Sequence[float]) -> Interval:
    return Interval(-math.inf, statistics.median(numbers) if numbers else math.nan, math.inf)


@functools.cache
def _student(looks: int, count: int) -> float:
    """How many standard errors of a mean of so many numbers are on each side of it."""
    missed = (1 - CONFIDENCE) / looks
    return float(_special().stdtrit(count - 1, 1 - missed / 2))


@functools.cache
def _place(looks: int, count: int) -> int:
    """Between the number at this place from below, and that from above, the median lies; 0 where none will do.

    The median is below the lower one only if fewer than so many of the numbers are below the median.
    """
    missed = (1 - CONFIDENCE) / looks
    place = 0
    while place < count / 2 and _special().bdtr(place, count, 0.5) <= missed / 2:
        place += 1
    return place


def _special() -> Any:
    """SciPy's special functions, which load in a tenth of the time that its statistics take."""
    try:
        from scipy import special
    except ModuleNotFoundError:
        raise missing_extra("precast.tune", "scipy", "tune") from None
    return special
