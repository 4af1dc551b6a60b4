"""Comparison in this suite: every difference is seen, and so is a program in which autocast has no part."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import precast
from tests.conformance.compare import amp, assert_same, difference, used
from tests.conformance.systems import SYSTEMS, TORCH, MakeRegion, System

ONE = torch.ones(2)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (ONE, ONE.half()),
        (ONE, ONE.reshape(2, 1)),
        (ONE, ONE.to_sparse()),
        (ONE, ONE.clone().requires_grad_()),
        (ONE, torch.nextafter(ONE, 2 * ONE)),
        (torch.zeros(1), -torch.zeros(1)),
        (torch.tensor(1.0), torch.tensor(-1.0)),
        (ONE * math.nan, ONE * math.nan),
        (ONE, None),
        (ONE, RuntimeError),
        (ValueError, RuntimeError),
        ([ONE], [ONE, ONE]),
        ([ONE], (ONE,)),
        ({"a": [ONE, (ONE, 1)]}, {"a": [ONE, (ONE, 2)]}),
        ({"a": ONE}, {"b": ONE}),
    ],
    ids=str,
)
def test_what_differs_is_seen(ours: Any, theirs: Any) -> None:
    assert difference(ours, theirs, "result")
    assert difference(theirs, ours, "result")


@pytest.mark.parametrize(
    "value", [ONE, ONE.bfloat16(), ONE.to_sparse(), [ONE, {"a": (ONE, None)}], RuntimeError, 1.5]
)
def test_equal_values_are_equal(value: Any) -> None:
    assert difference(value, value, "result") == ""


def test_the_place_of_a_difference_is_named() -> None:
    assert difference([1, [ONE, ONE]], [1, [ONE, 2 * ONE]], "result").startswith("result[1][1]: ")


def test_a_program_without_a_part_for_autocast_is_refused() -> None:
    with pytest.raises(AssertionError, match="autocast has no part"):
        assert_same(SYSTEMS[0], lambda region: torch.ones(1))


def test_another_policy_is_seen() -> None:
    """On the engine that the suite tests, with one rule unlike PyTorch's."""
    other = precast.Policy.load("torch").replace(ops={"linear": "fp32"})

    def region(*args: Any, **kwargs: Any) -> precast.autocast:
        return precast.autocast(*args, **kwargs, policy=other)

    def program(region: MakeRegion) -> Tensor:
        with region("cpu"):
            return F.linear(torch.randn(2, 2), torch.randn(2, 2))

    with pytest.raises(AssertionError, match="float32 against torch"):
        assert_same(System("another policy", region), program)


@pytest.mark.parametrize("system", SYSTEMS, ids=str)
def test_scaler_and_decorators_are_those_of_the_system(system: System) -> None:
    with TORCH() as region:
        assert type(amp(region).GradScaler("cpu")) is torch.amp.GradScaler
        assert amp(region).custom_fwd is torch.amp.custom_fwd is not precast.custom_fwd
    with system() as region:
        assert type(amp(region).GradScaler("cpu")) is precast.GradScaler
        assert amp(region).custom_fwd is precast.custom_fwd
        assert amp(region).custom_bwd is precast.custom_bwd


def test_gradients_are_compared() -> None:
    """A cache that is off adds them up in another precision."""

    def make() -> Any:
        module = torch.nn.Linear(64, 64)
        x = torch.randn(64, 64)
        return module, lambda: module(x)

    def region(*args: Any, **kwargs: Any) -> torch.autocast:
        return torch.autocast(*args, **{**kwargs, "cache_enabled": False})

    with pytest.raises(AssertionError, match=r"result\[0\]\[1\]\[1\]\[\d\]"):
        assert_same(System("no cache", region), used, make, torch.bfloat16)
