"""Confidence intervals of a mean and of a median.

Invariants:
- both are exact: Student's interval for the mean of normally distributed numbers, and the interval of order statistics
  for the median of any independent numbers;
- a caller that looks several times and may stop at each look passes `looks`: all its intervals together hold with
  `CONFIDENCE`.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from precast._internal.missing import missing_extra

__all__ = ["CONFIDENCE", "UNKNOWN", "Interval", "mean_interval", "median_interval"]

CONFIDENCE: Final = 0.95


@dataclass(frozen=True)
class Interval:
    """An estimate and the ends of its interval; the ends are infinite where nothing is measured."""

    low: float
    middle: float
    high: float


UNKNOWN: Final = Interval(-math.inf, math.nan, math.inf)


def mean_interval(numbers: Sequence[float], *, looks: int = 1) -> Interval:
    """Return the interval of the mean of the distribution that these numbers are a sample of."""
    count = len(numbers)
    if count < 2:
        return _without_ends(numbers)
    mean = statistics.fmean(numbers)
    half = _standard_errors(looks, count) * statistics.stdev(numbers) / math.sqrt(count)
    return Interval(mean - half, mean, mean + half)


def median_interval(numbers: Sequence[float], *, looks: int = 1) -> Interval:
    """Return the interval of the median; its ends are numbers of the sample."""
    ordered, rank = sorted(numbers), _rank(looks, len(numbers))
    if rank == 0:
        return _without_ends(ordered)
    return Interval(ordered[rank - 1], statistics.median(ordered), ordered[-rank])


def _without_ends(numbers: Sequence[float]) -> Interval:
    return Interval(-math.inf, statistics.median(numbers) if numbers else math.nan, math.inf)


@functools.cache
def _standard_errors(looks: int, count: int) -> float:
    """Return half of the width of the interval of a mean, in standard errors."""
    return float(_special().stdtrit(count - 1, 1 - (1 - CONFIDENCE) / looks / 2))


@functools.cache
def _rank(looks: int, count: int) -> int:
    """Return the rank of the numbers, from below and from above, between which the median lies; 0 if none suffices."""
    missed = (1 - CONFIDENCE) / looks
    rank = 0
    while rank < count / 2 and _special().bdtr(rank, count, 0.5) <= missed / 2:
        rank += 1
    return rank


def _special() -> Any:
    """Return SciPy's special functions, which load in a tenth of the time of its statistics."""
    try:
        from scipy import special
    except ModuleNotFoundError:
        raise missing_extra("precast.tune", "scipy", "tune") from None
    return special
