"""Networks in which one module must not run in 16 bits, and all others may: what a search for a policy has to find.

Each is a chain of residual blocks with one that is planted among them, at a place and of sizes that the seed decides.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from precast.policy.policy import Policy, Rule
from precast.tuning.setups import Workload

__all__ = ["CASES", "PLANTED", "Block", "Case", "is_held_back", "workload"]

PLANTED: Final = "planted"
"""The name of the module that is planted."""


class Block(nn.Module):
    """A residual block, in which 16 bits lose nothing that counts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Runs it."""
        added: Tensor = self.down(torch.tanh(self.up(x)))
        return x + added


class Overflow(nn.Module):
    """Its results are some hundred thousand, which float16 does not have."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Runs it; what it adds to its input is of usual size."""
        large = F.linear(x * 1e3, self.inner.weight * 1e3, self.inner.bias)
        return x + F.layer_norm(large, large.shape[-1:])


class _Shrunk(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 1e-16


class Underflow(nn.Module):
    """Its gradients are so small that no loss scale brings them into float16's range."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Runs it."""
        small = F.linear(x, self.inner.weight, self.inner.bias)
        shrunk: Tensor = _Shrunk.apply(small)  # type: ignore[no-untyped-call]
        return x + shrunk


class Loses(nn.Module):
    """It takes the mean of numbers that are large beside their differences."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Runs it."""
        far: Tensor = self.inner(x) + 300
        return x + (far - far.mean(-1, keepdim=True))


class Head(nn.Module):
    """The last layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Runs it."""
        result: Tensor = self.out(x)
        return result


@dataclass(frozen=True)
class Case:
    """What is planted, and in which dtype it is lost."""

    made: Callable[[int], nn.Module]
    low: torch.dtype
    needed: frozenset[str]
    """Operations of the planted module of which at least one must be held back."""


CASES: Final = {
    "overflow": Case(Overflow, torch.float16, frozenset({"linear"})),
    "underflow": Case(Underflow, torch.float16, frozenset({"linear"})),
    "reduction": Case(Loses, torch.bfloat16, frozenset({"mean", "add", "sub"})),
}


def is_held_back(policy: Policy, case: Case) -> bool:
    """Return True if an operation of the planted module is in float32 under a policy, and the linear head is not."""
    places = (PLANTED, f"{PLANTED}.inner")
    rules = {policy.resolve(op, "cpu", place).rule for op in case.needed for place in places}
    return Rule.FP32 in rules and policy.resolve("linear", "cpu", "head.out").rule is not Rule.FP32


def workload(case: Case, seed: int) -> Workload:
    """A network with what is planted, and batches that it can learn."""
    model = _network(case, seed)
    width = next(iter(model.parameters())).shape[-1]
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(32, width, generator=generator) for _ in range(4)]
    batches = tuple((x, (x[:, :4] + 0.5 * x[:, 4:8]).argmax(1)) for x in inputs)
    return Workload(model, _loss, batches, lambda p: torch.optim.AdamW(p, lr=1e-3), "cpu")


def _network(case: Case, seed: int) -> nn.Module:
    draw = random.Random(seed)
    width, depth = draw.choice([8, 12, 16]), draw.randrange(2, 6)
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        chain = nn.Sequential()
        place = draw.randrange(depth)
        for number in range(depth):
            if number == place:
                chain.add_module(PLANTED, case.made(width))
            chain.add_module(f"block{number}", Block(width))
        chain.add_module("head", Head(width))
    return chain


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).float(), batch[1])
