"""`python -m benchmarks.importing`: every case is measured, and the page has a place for the figures."""

from __future__ import annotations

from benchmarks import importing


def test_each_case_has_its_time_and_more_names_take_longer() -> None:
    result = dict(importing.cost(rounds=1))
    assert tuple(result) == importing.CASES
    assert 0 < result["import precast"] < result["from precast import *"]
    assert importing.TARGETS.keys() <= result.keys()
