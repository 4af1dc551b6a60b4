"""A clock for tests of measured times, which no other program of the machine can move."""

from __future__ import annotations

import random

import pytest

from precast.tuning import inference, tasks, training


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands but for what is added to its only number; each look at it takes up to a tenth of 10 ms."""
    now, uneven = [0.0], random.Random(0)

    def look(_device_type: str) -> float:
        now[0] += 0.001 * uneven.random()
        return now[0]

    for module in (inference, tasks, training):
        monkeypatch.setattr(module, "current_time", look)
    return now
