"""`python -m benchmarks.scaler`: that what is counted is counted right."""

from __future__ import annotations

import pytest

from benchmarks import scaler


def test_a_step_waits_no_more_than_under_torchs_scaler_and_never_with_a_fused_optimizer() -> None:
    rows = {name: (float(torchs), float(ours)) for name, torchs, ours in scaler.waits(steps=3)}
    assert rows["foreach Adam"][0] >= 1
    assert all(ours <= torchs for torchs, ours in rows.values())
    assert rows["fused Adam"] == (0.0, 0.0)


def test_a_row_of_costs_is_a_ratio_and_its_spread() -> None:
    rows = scaler.cost(rounds=3, calls=1, count=2, side=2)
    assert [row[0] for row in rows] == ["foreach Adam, 2 parameters", "fused Adam, 2 parameters"]
    assert all(float(ratio) > 0 and float(spread) >= 0 for _, ratio, spread in rows)


def test_the_page_has_a_place_for_the_figures() -> None:
    page = scaler.PAGE.read_text(encoding="utf-8")
    assert page.count(scaler.BEGIN) == page.count(scaler.END) == 1
    between = page.partition(scaler.BEGIN)[2].partition(scaler.END)[0]
    if not between:
        pytest.skip("not measured yet")
    assert "ratio to torch's scaler" in between
