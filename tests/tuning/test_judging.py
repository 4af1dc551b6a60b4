"""What is handed out after a proof is the best of all that trained as well, and what it beat is said."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from precast.policy.policy import Policy
from precast.tuning.inference import InferenceTask
from precast.tuning.judging import Judge
from precast.tuning.proof import Proof, SetupFigures, compare
from precast.tuning.setups import FLOAT32, Setup
from precast.tuning.training import TrainingTask
from precast.tuning.tuner import duration_text

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
    judge = Judge(objective, proof, TASK)
    best, because = judge.best(setups, {"default"})
    if undecided is not None:
        undecided += judge.undecided(setups)
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


def test_a_setup_that_needs_more_memory_is_called_worse() -> None:
    kept = {"float32": 100, "default": 60, "tuned": 70, "lean": 60}
    others = dict.fromkeys(["default", "tuned", "lean"], 1.0)
    name, because = _best(others, objective="memory", kept=kept)
    assert name == "default"
    assert "tuned is worse than default: it keeps 1.17 of the memory of default" in because
    assert "lean is no better than default: it keeps 1.00 of the memory of default" in because


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


def _changes(ratio: float, *, noise=0.01, loss_noise=1e-4, seeds=3, ended="time", task=TASK):
    """The changes for trainings whose steps take `ratio` of float32's, with times and losses that spread."""
    chances = random.Random(0)
    figures = {
        name: SetupFigures(
            name,
            [1 + loss_noise * chances.gauss(0, 1) for _ in range(seeds)],
            seconds=[mean * math.exp(noise * chances.gauss(0, 1)) for _ in range(seeds * 8)],
        )
        for name, mean in (("float32", 1.0), ("default", ratio))
    }
    proof = Proof(figures, [], 10, seeds, TOLERANCE, ended)
    proof.comparisons = [compare(proof, "default", "float32", TASK)]
    return proof, "\n".join(Judge("time", proof, task).deciding_changes(["default"]))


def test_a_longer_budget_is_named_where_the_time_ended() -> None:
    assert "a longer budget" in _changes(0.9, noise=0.5)[1]
    assert "a longer budget" not in _changes(0.9, noise=0.5, ended="seeds")[1]


def test_a_quieter_machine_is_named_where_all_seeds_were_used() -> None:
    assert "a quieter machine" in _changes(0.9, noise=0.5, ended="seeds")[1]
    assert "a quieter machine" not in _changes(0.5, loss_noise=0.05, ended="seeds")[1]


def test_a_tolerance_is_named_where_losses_are_open() -> None:
    proof, text = _changes(0.5, loss_noise=0.05)
    assert proof.comparisons[0].loss == "cannot tell"
    assert f"a tolerance of {proof.comparisons[0].difference.high:.2%} or more" in text
    assert "a tolerance" not in _changes(0.9, noise=0.3)[1]


def test_more_batches_decide_a_metric() -> None:
    task = InferenceTask(None)  # type: ignore[arg-type]
    assert "more batches than 4" in _changes(0.5, loss_noise=0.006, seeds=4, task=task)[1]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "1s"), (61.0, "61s"), (91.0, "2m"), (3600.0, "60m")]
)
def test_budgets_are_written_as_the_command_takes_them(seconds: float, text: str) -> None:
    from precast.cli import tune_inputs

    assert duration_text(seconds) == text
    assert tune_inputs.budget(text) >= seconds
