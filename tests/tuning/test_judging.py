"""What is handed out after a proof is the best of all that trained as well, and what it beat is said."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from precast.policy.policy import Policy
from precast.tuning.judging import Judge
from precast.tuning.proof import LOOKS, Figures, Proof, compare
from precast.tuning.training import FLOAT32, Setup

TOLERANCE = 0.01


def _setup(name: str) -> Setup:
    return Setup(name, Policy(name, {}), torch.bfloat16)


def _best(
    seconds: dict[str, float],
    *,
    objective="time",
    losses=None,
    seeds=None,
    noise=0.002,
    undecided=None,
    **options,
):
    """The answer by the times of steps, the losses and the memory of setups; the first is the base policy."""
    figures = {
        name: Figures(
            name,
            [
                (losses or {}).get(name, 1.0) * (1 + 1e-4 * i)
                for i in range((seeds or {}).get(name, 6))
            ],
            seconds=[took * (1 + noise * (i * (place + 1) % 31 % 5)) for i in range(30)],
        )
        for place, (name, took) in enumerate({"float32": 1.0, **seconds}.items())
    }
    setups = [_setup(name) for name in seconds]
    proof = Proof(figures, [], 8, 6, TOLERANCE, "proven")
    names = list(figures)
    proof.comparisons = [
        compare(proof, name, against, len(LOOKS))
        for place, name in enumerate(names)
        for against in names[:place]
    ]
    given = {"kept": {}, "silent": {}, "bases": {"default"}, **options}
    judge = Judge(objective, **given)
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


def test_what_was_too_slow_to_go_on_with_is_said_to_be_slow() -> None:
    """Its loss is known too little to say anything else."""
    name, because = _best({"default": 2.0, "tuned": 0.5}, seeds={"default": 1})
    assert name == "tuned"
    assert "default is slower: tuned takes 0.25" in because


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
