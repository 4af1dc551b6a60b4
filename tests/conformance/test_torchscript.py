"""TorchScript: scripted, traced, frozen and loaded modules, forked parts, and regions inside scripted functions."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.conformance.compare import assert_same, differentiate, in_both_dtypes, refused
from tests.conformance.systems import MakeRegion, System, on_all_systems

# TorchScript is deprecated, and programs still use it.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]

RUNS = 3
"""The executor profiles first, then optimises, and then may specialise again."""


def fresh(name: str) -> nn.Module:
    """A module of a class that no other test has scripted: scripted instances of one class share their graphs."""

    class Straight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.randn(4, 4))
            self.second = nn.Parameter(torch.randn(4, 4))
            self.bias = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(torch.relu(F.linear(x, self.first, self.bias)), self.second)

    class Branching(Straight):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.matmul(x, self.first) + self.bias
            if bool(y.sum() > 0.0):
                return F.gelu(y)
            return torch.mm(y.float(), self.second)

    class Forking(Straight):
        def part(self, x: Tensor) -> Tensor:
            return F.linear(x, self.first, self.bias)

        def forward(self, x: Tensor) -> Tensor:
            other = torch.jit.fork(self.part, x)
            return self.part(torch.tanh(x)) + torch.jit.wait(other)

    class Typed(Straight):
        def forward(self, x: Tensor) -> Tensor:
            parts = [x, F.linear(x, self.first)]
            joined = torch.cat([torch.stack(parts).sum(0), F.layer_norm(x, [4], self.bias)])
            return F.mse_loss(joined @ self.second, torch.cat(parts))

    class Islands(Straight):
        def forward(self, x: Tensor) -> Tensor:
            y = F.linear(x, self.first)
            with torch.autocast("cpu", enabled=False):
                y = F.linear(y.float(), self.second)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return F.linear(y, self.second, self.bias)

    kinds: dict[str, type[nn.Module]] = {
        kind.__name__: kind for kind in (Straight, Branching, Forking, Typed, Islands)
    }
    return kinds[name]()


def _loaded(module: torch.jit.ScriptModule) -> Any:
    file = io.BytesIO()
    torch.jit.save(module, file)
    file.seek(0)
    return torch.jit.load(file)


def _copied(module: nn.Module) -> Any:
    script = torch.jit.script(module)
    return script.copy()


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "scripted": torch.jit.script,
    "traced": lambda module: torch.jit.trace(module, (torch.randn(2, 4),)),
    "loaded": lambda module: _loaded(torch.jit.script(module)),
    "frozen": lambda module: torch.jit.freeze(torch.jit.script(module.eval())),
    "optimised": lambda module: torch.jit.optimize_for_inference(torch.jit.script(module.eval())),
}


WAYS_OF = {
    "Straight": list(WAYS),
    "Branching": ["scripted", "frozen"],
    "Forking": ["scripted", "traced", "loaded"],
    "Typed": ["scripted", "traced"],
    "Islands": ["scripted", "loaded"],
}


@in_both_dtypes
@pytest.mark.parametrize(
    ("name", "way"), [(name, way) for name in WAYS_OF for way in WAYS_OF[name]]
)
@on_all_systems
def test_modules(system: System, name: str, way: str, dtype: torch.dtype) -> None:
    assert_same(system, _runs, name, way, dtype)


def _runs(region: MakeRegion, name: str, way: str, dtype: torch.dtype) -> Any:
    """Results and gradients of every run."""
    script = WAYS[way](fresh(name))
    x, result = torch.randn(2, 4), []
    for _ in range(RUNS):
        with region("cpu", dtype=dtype):
            results = script(x)
        script.zero_grad()
        # In float16, PyTorch's own derivative of a region of bfloat16 inside mixes the two.
        result.append((results, refused(lambda r=results: differentiate(r, script.parameters()))))
    return result


@on_all_systems
def test_scripted_functions_that_open_the_only_region(system: System) -> None:
    assert_same(system, _opening, 3)


def _opening(region: MakeRegion, runs: int) -> Any:
    """Eager code in a region, then a scripted function with a region of its own, which is PyTorch's."""

    @torch.jit.script
    def scripted(x: Tensor, weight: Tensor) -> Tensor:
        with torch.autocast("cpu"):
            y = torch.mm(x, weight)
        return torch.mm(y.float(), weight)

    weight, x, result = nn.Parameter(torch.randn(4, 4)), torch.randn(2, 4), []
    for _ in range(runs):
        with region("cpu"):
            y = F.linear(x, weight)
        result.append((y, scripted(x, weight)))
    return result
