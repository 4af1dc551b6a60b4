"""`python -m benchmarks.scaler`: that what is counted is counted right."""

from __future__ import annotations

import itertools

import pytest
import torch

from benchmarks import networks, scaler


def test_a_row_has_a_ratio_and_its_spread_and_the_waits_which_are_no_more_than_torchs() -> None:
    foreach, fused = scaler.rows_on(torch.device("cpu"), rounds=3, calls=1, count=2, side=2)
    assert [foreach["case"], fused["case"]] == ["foreach Adam", "fused Adam"]
    assert all(row["ratio"] > 0 and row["ratio_iqr"] >= 0 for row in (foreach, fused))
    assert foreach["waits_precast"] <= foreach["waits_torch"] > 0
    assert (fused["waits_torch"], fused["waits_precast"]) == (0, 0)


def test_a_search_counts_skipped_steps_and_those_until_the_plateau(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = networks.mlp(8, 4, layers=2)
    monkeypatch.setattr(scaler, "_networks", lambda: iter([("tiny", network)]))
    too_high = scaler.Search(network, 2.0**40, 8, 2000)
    skips = [after < before for before, after in itertools.pairwise(too_high.scales)]
    assert skips[0], "2**40 times these gradients is beyond float16"
    assert too_high.skipped in {
        sum(skips),
        sum(skips) + 1,
    }  # what the last step did has no scale after it
    assert too_high.steps_until(too_high.scales[3]) == 2, "within 2x: one backoff before"
    assert too_high.steps_until(2.0**-60) is None
    fine = scaler.Search(network, 1.0, 4, 2000)
    assert (fine.skipped, fine.scales) == (0, [1.0] * 4)

    [(name, plateau, skipped, until, auto_skipped, auto_until)] = scaler.searches(steps=8)
    assert name == "tiny"
    assert plateau.startswith("2^")
    assert int(skipped) <= 8
    assert int(auto_skipped) <= 8
    assert int(auto_until) < 8, "the plateau is found from the gradients"
    assert until.startswith("over") or int(until) < 8
