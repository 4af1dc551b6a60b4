"""Intervals contain what they are to contain as often as they say, also for who looks again and again."""

from __future__ import annotations

import math
import random

import pytest

from precast.tuning.proof import Interval, mean_interval, median_interval

LOOKS = (3, 6, 12, 24)


def _covers(found: Interval, value: float) -> bool:
    return found.low <= value <= found.high


@pytest.mark.parametrize("count", [2, 3, 12])
def test_the_mean_is_in_19_of_20_intervals(count: int) -> None:
    draw = random.Random(count)
    samples = [[draw.gauss(1.0, 3.0) for _ in range(count)] for _ in range(2000)]
    share = sum(_covers(mean_interval(sample), 1.0) for sample in samples) / len(samples)
    assert 0.935 < share < 0.965


@pytest.mark.parametrize("count", [6, 25, 60])
def test_the_median_is_in_at_least_19_of_20_intervals(count: int) -> None:
    """Of numbers with a long tail, as times have."""
    draw = random.Random(count)
    samples = [[draw.expovariate(1.0) for _ in range(count)] for _ in range(2000)]
    share = sum(_covers(median_interval(sample), math.log(2)) for sample in samples) / len(samples)
    assert share > 0.94
    if count >= 25:
        assert share < 0.985  # and they are no wider than the counts of a sample allow


def test_all_intervals_of_several_looks_hold_together() -> None:
    draw, missed, missed_by_single = random.Random(0), 0, 0
    for _ in range(1500):
        numbers = [draw.gauss(0.0, 1.0) for _ in range(LOOKS[-1])]
        seen = [numbers[:count] for count in LOOKS]
        missed += not all(_covers(mean_interval(part, looks=len(LOOKS)), 0.0) for part in seen)
        missed_by_single += not all(_covers(mean_interval(part), 0.0) for part in seen)
    assert missed / 1500 < 0.055
    assert missed_by_single / 1500 > 0.08


def test_an_interval_of_the_median_ends_in_numbers_of_the_sample() -> None:
    assert median_interval([*range(1, 11)]) == Interval(2, 5.5, 9)  # binomial: 1 - 2 * 11 / 1024


@pytest.mark.parametrize("interval", [mean_interval, median_interval])
@pytest.mark.parametrize("numbers", [[], [1.0]])
def test_of_few_numbers_nothing_is_known(interval, numbers: list[float]) -> None:
    found = interval(numbers)
    assert (found.low, found.high) == (-math.inf, math.inf)


def test_numbers_without_spread_leave_no_doubt() -> None:
    assert mean_interval([0.5, 0.5, 0.5], looks=4) == Interval(0.5, 0.5, 0.5)
