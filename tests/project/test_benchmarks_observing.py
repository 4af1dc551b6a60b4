"""`python -m benchmarks observing`: that what is compared is watched as its name says."""

from __future__ import annotations

from typing import Any

import pytest

import precast
from benchmarks import observing
from precast.diagnostics.numerics.monitoring import Monitor


@pytest.fixture
def rows() -> dict[str, dict[str, Any]]:
    return {row["kind"]: row for row in observing.run(rounds=3, cases=((1, 4),), width=16)}


def test_every_watch_has_a_row_beside_the_plain_step(rows: dict[str, dict[str, Any]]) -> None:
    assert set(rows) == {"plain", *observing.WATCHES, "ended", observing.HEALTH, *observing.MEMORY}
    assert rows["plain"]["ratio"] == 1
    assert set(observing.TARGETS) <= set(rows)
    assert all(row["ratio"] > 0 for row in rows.values())


def test_steps_are_counted_as_the_names_say(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Monitor] = []
    plain = precast.monitor

    def monitor(*args: Any, **kwargs: Any) -> Monitor:
        made.append(plain(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(precast, "monitor", monitor)
    list(observing.run(rounds=1, cases=((1, 4),), width=16))
    counted = [{tuple(entry["steps"]) for entry in one.to_dict()["modules"]} for one in made]
    assert counted == [{(0,)}, {(0, 1, 2, 3)}]  # the first step is counted at any interval
