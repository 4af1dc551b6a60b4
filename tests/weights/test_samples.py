"""The samples of weights show each write to a whole weight, and are read only where that is safe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from precast.engine import registration
from precast.weights.native.api import NativeHeldCopy, native_engine
from precast.weights.samples import WeightSamples

ROUNDS = 4
"""The number of checks after which all recorded values have been compared."""


@pytest.fixture(params=registration.ENGINES)
def samples(request: pytest.FixtureRequest) -> Iterator[Any]:
    with registration.use_engine(request.param):
        yield WeightSamples if request.param == "reference" else _native_samples


def _native_samples() -> Any:
    assert native_engine.api is not None
    return NativeHeldCopy(native_engine.api, nn.Parameter(torch.ones(1)), torch.bfloat16)


def recorded(samples: Any, weight: Tensor) -> Any:
    result = samples()
    result.record_samples(weight)
    return result


def shows(samples: Any, weight: Tensor, *, compares_all: bool = False) -> bool:
    """Return True if the samples show a write."""
    return not samples.match_samples(weight, compares_all=compares_all)


WEIGHTS = {
    "matrix": lambda: torch.randn(160, 160),
    "transposed": lambda: torch.randn(40, 160).t(),
    "channels last": lambda: torch.randn(16, 8, 3, 3).to(memory_format=torch.channels_last),
    "with gaps": lambda: torch.randn(64, 100)[::2, 3:40],
    "a part of a storage": lambda: torch.randn(1000)[37:531],
    "repeated": lambda: torch.randn(50, 1).expand(50, 40),
    "33 elements": lambda: torch.randn(33),
    "32 elements": lambda: torch.randn(32),
    "5 elements": lambda: torch.randn(5),
    "a scalar": lambda: torch.randn(()),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_each_check_shows_a_write_to_the_whole_weight(samples: Any, name: str) -> None:
    weight = WEIGHTS[name]()
    found = recorded(samples, weight)
    written = weight[:, :1] if name == "repeated" else weight
    for _ in range(2 * ROUNDS):
        assert not shows(found, weight)
        before = written.clone()
        written.mul_(1 + 1e-6)
        assert shows(found, weight)
        written.copy_(before)


@pytest.mark.parametrize("elements", [2, 8, 31, 32])
def test_a_small_weight_is_compared_as_a_whole(samples: Any, elements: int) -> None:
    weight = torch.randn(elements)
    found = recorded(samples, weight)
    for i in range(elements):
        weight[i] += 1
        assert shows(found, weight)
        weight[i] = weight.new_tensor(float("nan"))
        assert shows(found, weight)
        found.record_samples(weight)
        assert not shows(found, weight)


@pytest.mark.parametrize("start", range(0, 81, 5))
def test_each_check_shows_a_write_to_a_sixth_that_is_adjacent(samples: Any, start: int) -> None:
    weight = torch.randn(96, 50)
    found = recorded(samples, weight)
    for _ in range(ROUNDS):
        before = weight.clone()
        weight[start : start + 16] *= 2
        assert shows(found, weight)
        weight.copy_(before)


def test_a_write_to_a_weight_with_many_zeros_is_mostly_shown(samples: Any) -> None:
    count = 0
    for seed in range(200):
        draw = torch.Generator().manual_seed(seed)
        weight = torch.randn(100, 100, generator=draw)
        weight *= torch.rand(100, 100, generator=draw) > 0.9
        found = recorded(samples, weight)
        count += shows(found, weight.mul_(2))
    assert count > 180


def test_positions_differ_and_no_generator_of_pytorchs_is_used(samples: Any) -> None:
    state = torch.get_rng_state()
    weight = torch.randn(64, 64)
    torch.set_rng_state(state)
    seen = set()
    for _ in range(5):
        found = recorded(samples, weight)
        for i in range(0, 4096, 3):
            before = float(weight.view(-1)[i])
            weight.view(-1)[i] = 7.5
            if shows(found, weight, compares_all=True):
                seen.add(i)
            weight.view(-1)[i] = before
    assert torch.equal(torch.get_rng_state(), state)
    assert len(seen) > 32


def test_memory_that_is_gone_is_not_read(samples: Any) -> None:
    weight = torch.randn(200, 200)
    found = recorded(samples, weight)
    weight.untyped_storage().resize_(0)
    assert shows(found, weight)
    found.record_samples(weight)
    assert not shows(found, weight)  # there is nothing to compare
    weight.untyped_storage().resize_(200 * 200 * 4)
    weight.normal_()
    found.record_samples(weight)
    assert not shows(found, weight)


def test_a_weight_on_another_device_has_no_samples(samples: Any) -> None:
    weight = torch.empty(20, 20, device="meta")
    assert not shows(recorded(samples, weight), weight)


def test_an_empty_weight_has_no_samples(samples: Any) -> None:
    weight = torch.empty(0, 20)
    assert not shows(recorded(samples, weight), weight)
