"""Regions and `torch.compile`: outside of a compiled function or inside, its policy is the one that holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

import precast
from precast import Policy, engine

OTHER = Policy.load("torch").replace(name="other", ops={"linear": "fp32", "mm": "fp32"})
POLICIES = {"torch": Policy.load("torch"), "default": Policy.load("default"), "other": OTHER}
BACKENDS = ("eager", "aot_eager")
# Dynamo reads `.grad` of whatever crosses a graph break, and hides the warning where it is printed, not where it is
# made an error.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
weight = Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)))


@pytest.fixture(autouse=True)
def _as_in_a_fresh_process() -> Iterator[None]:
    torch.compiler.reset()
    engine.unregister()
    weight.grad = None
    yield
    torch.compiler.reset()


def layers(x: Tensor) -> Tensor:
    return F.gelu(F.linear(x, weight)) @ weight


def a_region(policy: Policy) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        with precast.autocast("cpu", policy=policy):
            return layers(x * 2)

    return forward


def operations_in_a_region(policy: Policy) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        x = x * 2
        with precast.autocast("cpu", policy=policy):
            x = F.linear(x, weight)
        return x * 2

    return forward


def a_kept_region(policy: Policy) -> Callable[[Tensor], Tensor]:
    region = precast.autocast("cpu", policy=policy)

    def forward(x: Tensor) -> Tensor:
        with region:
            return F.linear(layers(x), weight)

    return forward


def a_decorated_function(policy: Policy) -> Callable[[Tensor], Tensor]:
    decorated = precast.autocast("cpu", policy=policy)(layers)
    return lambda x: decorated(x * 2) * 2


def nested_regions(policy: Policy) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        with torch.autocast("cpu"):
            with precast.autocast("cpu", torch.float16, policy=policy):
                x = F.linear(x, weight)
                with precast.disable():
                    x = layers(x.float())
                with torch.autocast("cpu", torch.bfloat16):
                    x = layers(x)
            return x

    return forward


INSIDE = [a_region, operations_in_a_region, a_kept_region, a_decorated_function, nested_regions]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("write", INSIDE)
def test_a_region_inside_a_compiled_function_runs_its_policy(
    write: Any, policy: str, backend: str
) -> None:
    # Compiled first: what registers the kernels must not end up in a graph either.
    compiled = torch.compile(write(POLICIES[policy]), backend=backend)
    x = torch.randn(3, 4)
    results = [compiled(x) for _ in range(3)]
    torch.compiler.reset()
    expected = write(POLICIES[policy])(x)
    for result in results:
        assert result.dtype is expected.dtype
        assert torch.equal(result, expected)
        assert result.requires_grad


@pytest.mark.parametrize("write", INSIDE)
def test_a_graph_that_must_be_whole_is_refused(write: Any) -> None:
    compiled = torch.compile(write(OTHER), backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match=r"precast region|context manager"):
        compiled(torch.randn(3, 4))


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_error_in_the_compiled_function_leaves_nothing_behind(backend: str) -> None:
    def fails(x: Tensor) -> Tensor:
        with precast.autocast("cpu", policy=OTHER):
            return layers(x) @ torch.ones(5)

    compiled = torch.compile(fails, backend=backend)
    with pytest.raises(RuntimeError):
        compiled(torch.randn(3, 4))
    assert not torch.is_autocast_enabled("cpu")
    assert torch.autocast_increment_nesting() == 1
    assert torch.autocast_decrement_nesting() == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_region_around_a_compiled_function_equals_eager(policy: str, backend: str) -> None:
    compiled = torch.compile(layers, backend=backend)
    x = torch.randn(3, 4)
    with precast.autocast("cpu", policy=POLICIES[policy]):
        expected = layers(x)
        results = [compiled(x), compiled(x)]
        with torch.no_grad():
            weight.mul_(1.0)
        results.append(compiled(x))
    for result in results:
        assert result.dtype is expected.dtype
        assert torch.equal(result, expected)


@pytest.mark.parametrize("policy", ["torch", "default"])
def test_gradients_of_a_compiled_function_equal_pytorchs(policy: str) -> None:
    x = torch.randn(3, 4)

    def gradient(region: Any) -> Tensor:
        torch.compiler.reset()
        with region:
            loss = torch.compile(layers, backend="aot_eager")(x).float().square().sum()
        return torch.autograd.grad(loss, weight)[0]

    ours = gradient(precast.autocast("cpu", policy=POLICIES[policy]))
    assert torch.equal(ours, gradient(torch.autocast("cpu")))


def test_weights_written_between_calls_are_seen() -> None:
    compiled = torch.compile(layers, backend="aot_eager")
    x, before = torch.randn(3, 4), weight.detach().clone()
    with precast.autocast("cpu"), torch.no_grad():
        assert compiled(x).abs().sum() > 0
        weight.zero_()
        assert compiled(x).abs().sum() == 0
        weight.copy_(before)
