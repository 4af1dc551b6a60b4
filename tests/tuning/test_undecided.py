"""Conditions that would decide an undecided search are computed from what was measured, and suffice."""

from __future__ import annotations

import dataclasses
import math
import random
import time
from typing import Any

import pytest

from precast.tuning.intervals import Interval
from precast.tuning.proof import LOOKS, Figures, Proof, compare
from precast.tuning.undecided import OtherPrograms, SearchTime, budget_text, conditions
from precast.tuning.words import INFERENCE, TRAINING, Words

STEPS = 10


def proof(ratio: float, noise: float, *, seeds: int = 3, loss_noise: float = 1e-4) -> Proof:
    """Trainings whose steps take `ratio` of float32's, with times and losses that spread."""
    chances = random.Random(0)
    figures = {
        name: Figures(
            name,
            [1 + loss_noise * chances.gauss(0, 1) for _ in range(seeds)],
            seconds=[
                mean * math.exp(noise * chances.gauss(0, 1)) for _ in range(seeds * (STEPS - 2))
            ],
        )
        for name, mean in (("float32", 1.0), ("default", ratio))
    }
    made = Proof(figures, [], STEPS, seeds, 0.01, "time")
    made.comparisons = [compare(made, "default", "float32", len(LOOKS))]
    return made


def said(
    made: Proof, *, words: Words = TRAINING, others: float | None = 0.0, is_timed: bool = True
) -> str:
    spent = SearchTime(60.0, 10.0, 30.0, lambda left: min(50, int(left)), 0, others)
    return "\n".join(conditions(made, ["default"], spent, words, is_timed=is_timed))


def test_a_noisy_machine_is_named_with_what_was_measured() -> None:
    assert "a quieter machine: the times of a step in float32 spread by " in said(proof(0.9, 0.5))
    assert "other programs used 40% of the processors" in said(proof(0.993, 0.04), others=0.4)
    assert "quieter" not in said(proof(0.993, 0.04), others=None)
    assert "quieter" not in said(proof(0.9, 0.5), is_timed=False)


def test_the_budget_that_is_named_suffices_where_the_spread_stays() -> None:
    made = proof(0.9, 0.3)
    assert made.comparisons[0].ratio.high > 1
    text = said(made)
    assert "a budget of about " in text
    minutes = int(text.partition("a budget of about ")[2].partition("m")[0])
    # A seed of 10 steps of both took 10 seconds; so many seeds of 50 steps are trained in it.
    seeds = int((60 * minutes - 10) / 50)
    assert compare(proof(0.9, 0.3, seeds=5 * seeds), "default", "float32", 4).ratio.high < 1


def test_a_budget_that_would_not_do_is_not_named() -> None:
    made = proof(0.9, 0.3)
    [compared] = made.comparisons
    made.comparisons = [dataclasses.replace(compared, ratio=Interval(0.5, 0.995, 2.0))]
    assert "a budget" not in said(made)


def test_a_tolerance_is_named_where_losses_are_open() -> None:
    made = proof(0.5, 0.01, loss_noise=0.05)
    assert made.comparisons[0].loss == "cannot tell"
    widest = made.comparisons[0].difference.high
    assert f"a tolerance of {widest:.2%} or more" in said(made)
    assert "a tolerance" not in said(proof(0.9, 0.3))


def test_more_batches_decide_a_metric() -> None:
    made = proof(0.5, 0.01, seeds=4, loss_noise=0.006)
    assert made.comparisons[0].loss == "cannot tell"
    text = said(made, words=INFERENCE)
    assert " batches instead of 4" in text
    assert 4 < int(text.partition("about ")[2].partition(" batches")[0]) <= 32


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "1s"), (61.0, "61s"), (91.0, "2m"), (3600.0, "60m")]
)
def test_budgets_are_written_as_the_command_takes_them(seconds: float, text: str) -> None:
    from precast.cli import tune_inputs

    assert budget_text(seconds) == text
    assert tune_inputs.budget(text) >= seconds


def test_the_share_of_other_programs_is_a_share_or_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    others = OtherPrograms()
    time.sleep(0.05)
    share = others.share()
    assert share is None or 0 <= share <= 1
    times: list[Any] = [(100.0, 200.0, 10.0), (180.0, 300.0, 30.0)]
    monkeypatch.setattr("precast.tuning.undecided._processor_times", lambda: times.pop(0))
    others = OtherPrograms()
    assert others.share() == pytest.approx(0.6)
