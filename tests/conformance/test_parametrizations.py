"""Computed and shared weights: weight_norm, spectral_norm, orthogonal, own parametrizations, pruning, stateless."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.conformance.compare import Make, assert_same, in_both_dtypes, used
from tests.conformance.systems import System, on_all_systems

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).mT


class LowRank(nn.Module):
    """A product, which a region casts: the weight itself is in 16 bits then."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up @ self.down


def _layer(change: Callable[[nn.Module], Any]) -> Make:
    """A linear layer with its weight computed from others."""

    def make() -> Any:
        module = nn.Linear(4, 4)
        change(module)
        x = torch.randn(3, 4)
        return module, lambda: module(x)

    return make


def _own(*kinds: Callable[[], nn.Module]) -> Callable[[nn.Module], None]:
    def change(module: nn.Module) -> None:
        for kind in kinds:
            parametrize.register_parametrization(module, "weight", kind())

    return change


def _cached() -> Any:
    """`parametrize.cached` computes a weight once, and hands it out again."""
    module = nn.Linear(4, 4)
    _own(Symmetric, LowRank)(module)
    x = torch.randn(3, 4)

    def step() -> Any:
        with parametrize.cached():
            return module(x), module(x * 2)

    return module, step


def _taken_off() -> Any:
    """The weight of the first use is a plain tensor for the second."""
    module = nn.Linear(4, 4)
    _own(Symmetric)(module)
    x = torch.randn(3, 4)

    def step() -> Any:
        result = module(x)
        if parametrize.is_parametrized(module):
            parametrize.remove_parametrizations(module, "weight")
        return result

    return module, step


def _shared() -> Any:
    """One weight in several layers, and as its own transpose."""
    linear = nn.Linear(4, 4)
    module = nn.Sequential(linear, nn.LayerNorm(4), linear, nn.Softmax(-1), linear)
    x = torch.randn(3, 4)
    return module, lambda: module(x) @ linear.weight.t()


def _tied() -> Any:
    embedding, head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
    head.weight = embedding.weight
    rows = torch.tensor([[1, 5, 1]])
    return nn.ModuleList([embedding, head]), lambda: head(embedding(rows))


def _stateless() -> Any:
    module, other = nn.Linear(4, 4), nn.Linear(4, 4)
    x = torch.randn(3, 4)
    both = nn.ModuleList([module, other])

    def step() -> Any:
        weights = dict(other.named_parameters())
        return (
            module(x),
            torch.func.functional_call(module, weights, (x,)),
            torch.func.functional_call(module, {"weight": other.weight * 2}, (x,)),
            module(x),
        )

    return both, step


def _grown() -> Any:
    """Layers that are made at their first use."""
    module = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.LazyLinear(2))
    x = torch.randn(3, 4)
    module(x)
    return module, lambda: module(x)


MAKERS: dict[str, Make] = {
    "weight_norm": _layer(parametrizations.weight_norm),
    "weight_norm of all": _layer(lambda m: parametrizations.weight_norm(m, dim=None)),
    "spectral_norm": _layer(parametrizations.spectral_norm),
    "orthogonal": _layer(parametrizations.orthogonal),
    "orthogonal by reflections": _layer(
        lambda m: parametrizations.orthogonal(m, orthogonal_map="householder")
    ),
    "orthogonal by Cayley's map": _layer(
        lambda m: parametrizations.orthogonal(m, orthogonal_map="cayley")
    ),
    "own": _layer(_own(Symmetric)),
    "own, of products": _layer(_own(LowRank)),
    "two, one on the other": _layer(_own(Symmetric, LowRank)),
    "spectral_norm of own": _layer(
        lambda m: (_own(Symmetric)(m), parametrizations.spectral_norm(m))
    ),
    "the old weight_norm": _layer(nn.utils.weight_norm),
    "the old spectral_norm": _layer(nn.utils.spectral_norm),
    "pruned": _layer(lambda m: prune.l1_unstructured(m, "weight", 0.5)),
    "cached": _cached,
    "taken off": _taken_off,
    "shared": _shared,
    "tied": _tied,
    "stateless": _stateless,
    "lazy": _grown,
}


@in_both_dtypes
@pytest.mark.parametrize("name", MAKERS)
@on_all_systems
def test_weights(system: System, name: str, dtype: torch.dtype) -> None:
    assert_same(system, used, MAKERS[name], dtype)
