"""What is handed out after a proof is the best of all that trained as well, and what it beat is said."""

from __future__ import annotations

import dataclasses
import math
import random
import time
from typing import Any

import pytest
import torch

from precast.policy.policy import Policy
from precast.tuning.inference import InferenceTask
from precast.tuning.intervals import Interval
from precast.tuning.judging import (
    Judge,
    OtherPrograms,
    SearchTime,
    deciding_changes,
    duration_text,
)
from precast.tuning.proof import Proof, SetupFigures, compare
from precast.tuning.setups import FLOAT32, Setup
from precast.tuning.tasks import TuningTask
from precast.tuning.training import TrainingTask

TOLERANCE = 0.01
TASK = TrainingTask(None)  # type: ignore[arg-type]  # only its numbers of rounds are used


def _setup(name: str, silent: str = "") -> Setup:
    return Setup(name, Policy(name, {}), torch.bfloat16, silent)


def _best(
    seconds: dict[str, float],
    *,
    objective="time",
    losses=None,
    seeds=None,
    noise=0.002,
    undecided=None,
    kept=None,
    silent=None,
):
    """The answer by the times of steps, the losses and the memory of setups; the first is the base policy."""
    figures = {
        name: SetupFigures(
            name,
            [
                (losses or {}).get(name, 1.0) * (1 + 1e-4 * i)
                for i in range((seeds or {}).get(name, 6))
            ],
            kept_bytes=(kept or {}).get(name, 0),
            seconds=[took * (1 + noise * (i * (place + 1) % 31 % 5)) for i in range(30)],
        )
        for place, (name, took) in enumerate({"float32": 1.0, **seconds}.items())
    }
    setups = [_setup(name, (silent or {}).get(name, "")) for name in seconds]
    proof = Proof(figures, [], 8, 6, TOLERANCE, "proven")
    names = list(figures)
    proof.comparisons = [
        compare(proof, name, against, TASK)
        for place, name in enumerate(names)
        for against in names[:place]
    ]
    judge = Judge(objective, {"default"})
    best, because = judge.best(proof, setups)
    if undecided is not None:
        undecided += judge.undecided(proof, setups)
    return best.name, because


def test_the_fastest_of_those_that_beat_the_base_is_handed_out() -> None:
    name, because = _best({"default": 0.8, "tuned": 0.7, "lean": 0.5, "torch": 0.6})
    assert name == "lean"
    assert "default takes 0.80" in because
    assert "lean takes 0.62" in because
    assert "of the time of default" in because


def test_what_is_faster_by_less_than_can_be_told_is_not_handed_out() -> None:
    assert _best({"default": 0.8, "tuned": 0.7999})[0] == "default"
    name, because = _best({"default": 1.1, "tuned": 1.2})
    assert name == FLOAT32.name
    assert "default is slower than float32: it takes 1.10 (" in because


def test_what_trains_worse_is_not_handed_out_however_fast_it_is() -> None:
    name, because = _best({"default": 0.8, "tuned": 0.7, "lean": 0.3}, losses={"lean": 1.1})
    assert name == "tuned"
    assert "the loss of lean is worse than that of float32" in because


def test_what_does_not_train_a_parameter_is_not_handed_out() -> None:
    name, because = _best({"default": 0.8, "lean": 0.3}, silent={"lean": "body.weight"})
    assert name == "default"
    assert "under lean the gradient of body.weight is zero" in because


def test_of_memory_the_least_is_handed_out() -> None:
    kept = {"float32": 100, "default": 60, "tuned": 50, "lean": 40}
    others = dict.fromkeys(["default", "tuned", "lean"], 1.0)
    name, because = _best(others, objective="memory", kept=kept)
    assert name == "lean"
    assert "lean keeps 0.67 of the memory of default" in because


@pytest.mark.parametrize(
    ("case", "undecided"),
    [
        ({"noise": 0.2}, ["default", "tuned"]),
        ({"noise": 0.002}, []),
        ({"noise": 0.2, "losses": {"default": 1.1}}, ["tuned"]),
        ({"noise": 0.2, "silent": {"tuned": "body.weight"}}, ["default"]),
        ({"noise": 0.002, "seeds": {"tuned": 1}}, []),  # it is slower, whatever its loss
        ({"objective": "memory", "kept": {"float32": 3, "default": 3, "tuned": 4}}, []),
        (
            {
                "objective": "memory",
                "kept": {"float32": 3, "default": 2, "tuned": 4},
                "seeds": {"default": 1},
            },
            ["default"],
        ),
    ],
)
def test_what_may_be_better_than_float32_leaves_it_undecided(
    case: dict[str, Any], undecided: list[str]
) -> None:
    found: list[str] = []
    name, because = _best({"default": 1.02, "tuned": 1.03}, undecided=found, **case)
    assert name == FLOAT32.name
    assert found == undecided
    if case.get("objective") != "memory" and "default" in undecided:
        assert "could not tell whether default is faster than float32: it takes 1.0" in because


# --- changes that would decide a proof ---

STEPS = 10


def proof(ratio: float, noise: float, *, seeds: int = 3, loss_noise: float = 1e-4) -> Proof:
    """Trainings whose steps take `ratio` of float32's, with times and losses that spread."""
    chances = random.Random(0)
    figures = {
        name: SetupFigures(
            name,
            [1 + loss_noise * chances.gauss(0, 1) for _ in range(seeds)],
            seconds=[
                mean * math.exp(noise * chances.gauss(0, 1)) for _ in range(seeds * (STEPS - 2))
            ],
        )
        for name, mean in (("float32", 1.0), ("default", ratio))
    }
    made = Proof(figures, [], STEPS, seeds, 0.01, "time")
    made.comparisons = [compare(made, "default", "float32", TASK)]
    return made


def said(
    made: Proof, *, task: TuningTask = TASK, others: float = 0.0, is_timed: bool = True
) -> str:
    spent = SearchTime(60.0, 10.0, 30.0, other_programs=others)
    return "\n".join(deciding_changes(task, made, ["default"], spent, is_timed=is_timed))


def test_a_noisy_machine_is_named_with_what_was_measured() -> None:
    text = said(proof(0.9, 0.5), others=0.4)
    assert "a quieter machine: other programs used 40% of the processors" in text
    assert "quieter" not in said(proof(0.9, 0.5))  # the program itself varies
    assert "quieter" not in said(proof(0.9, 0.5), others=0.4, is_timed=False)


def test_the_budget_that_is_named_suffices_where_the_spread_stays() -> None:
    made = proof(0.9, 0.3)
    assert made.comparisons[0].ratio.high > 1
    text = said(made)
    assert "a budget of about " in text
    minutes = int(text.partition("a budget of about ")[2].partition("m")[0])
    # A seed of 10 steps of both took 10 seconds; so many seeds of 50 steps are trained in it.
    seeds = int((60 * minutes - 10) / 50)
    assert compare(proof(0.9, 0.3, seeds=5 * seeds), "default", "float32", TASK).ratio.high < 1


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
    text = said(made, task=InferenceTask(None))  # type: ignore[arg-type]
    assert " batches instead of 4" in text
    assert 4 < int(text.partition("about ")[2].partition(" batches")[0]) <= 32


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "1s"), (61.0, "61s"), (91.0, "2m"), (3600.0, "60m")]
)
def test_budgets_are_written_as_the_command_takes_them(seconds: float, text: str) -> None:
    from precast.cli import tune_inputs

    assert duration_text(seconds) == text
    assert tune_inputs.budget(text) >= seconds


def test_the_share_of_other_programs_is_a_share_or_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    others = OtherPrograms()
    time.sleep(0.05)
    share = others.share()
    assert 0 <= share <= 1
    times: list[Any] = [(100.0, 200.0, 10.0), (180.0, 300.0, 30.0)]
    monkeypatch.setattr("precast.tuning.judging._processor_times", lambda: times.pop(0))
    others = OtherPrograms()
    assert others.share() == pytest.approx(0.6)
