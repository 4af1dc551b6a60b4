"""Models that `precast.export` is tried on: each has something that a policy has to find its way through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import precast
from precast import Policy

__all__ = ["MODELS", "POLICIES", "Model"]

SIDE = 8


class Model(NamedTuple):
    """How a model is made, and how a new input of it."""

    make: Callable[[], nn.Module]
    example: Callable[[], tuple[Any, ...]]


class _RMSNorm(nn.Module):
    """Asks tensors for their dtypes, as many models do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(SIDE) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        found = x.to(torch.float32)
        found = found * torch.rsqrt(found.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * found.to(x.dtype)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = _RMSNorm()
        self.qkv = nn.Linear(SIDE, 3 * SIDE)
        self.out = nn.Linear(SIDE, SIDE)
        self.register_buffer("bias", torch.full((1, 1, 1), 0.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        low = torch.finfo(q.dtype).min if q.dtype is torch.float16 else -1e30
        scores = torch.where(self.bias > 0.4, q @ k.mT, low)
        attended = F.scaled_dot_product_attention(q, k, v) + scores.softmax(-1) @ v
        return x + self.out(attended)


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, SIDE)
        self.block = _Block()
        self.last = nn.Linear(SIDE, 11, bias=False)
        self.last.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.last(self.block(self.embed(tokens)))
        return found


class _Regions(nn.Module):
    """Opens regions of its own: another dtype, none, another policy."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIDE, SIDE)
        self.other = Policy.load("torch").replace(
            name="other", ops={"sin": "lower", "linear": "fp32"}
        )

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        first = self.layer(x)
        with torch.autocast("cpu", dtype=torch.float16):
            second = self.layer(x)
            with torch.autocast("cpu", enabled=False):
                third = self.layer(x).relu()
        with precast.autocast("cpu", policy=self.other):
            fourth = self.layer(x).sin()
        with torch.autocast("cpu", enabled=False), torch.enable_grad():
            fifth = self.layer(x.double().float())
        return first, second, third, fourth, fifth


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIDE, SIDE)
        self.other = nn.Linear(SIDE, SIDE)

    def forward(self, x: Tensor) -> Tensor:
        def yes(v: Tensor) -> Tensor:
            return self.layer(v) + 1

        def no(v: Tensor) -> Tensor:
            return self.other(self.layer(v)).exp()

        found: Tensor = torch.cond(x.sum() > 0, yes, no, (x,))
        return self.layer(found)


class _Loops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIDE, SIDE)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        from torch._higher_order_ops.scan import scan
        from torch._higher_order_ops.while_loop import while_loop

        def more(count: Tensor, _: Tensor) -> Tensor:
            return count < 3

        def again(count: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            return count + 1, self.layer(v).float() / 2

        def step(carry: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            new = self.layer(carry).float() + v
            return new, new.clone()

        count, looped = while_loop(more, again, (torch.zeros((), dtype=torch.int64), x))
        last, each = scan(step, x[0], x)
        return looped + count, last, each


class _Writes(nn.Module):
    """Writes a buffer, and tensors in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIDE, SIDE)
        self.norm = nn.BatchNorm1d(SIDE)
        self.register_buffer("calls", torch.zeros(SIDE))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        low = self.layer(x)
        low += self.calls.bfloat16()
        square = torch.zeros(SIDE, SIDE)
        square.index_add_(0, torch.arange(low.shape[0]), low.float())
        square.addmm_(square.clone(), square.t().clone())
        return self.norm(low) + self.layer(square)[: low.shape[0]] + F.linear(low, square)


class _Mixed(nn.Module):
    """Operations on mixed dtypes, which PyTorch refuses and the policy `default` promotes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIDE, SIDE)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        low = self.layer(x)
        added = torch.index_add(x, 0, torch.tensor([0, 1]), low[:2])
        halves = [torch.cat([x.to(dtype)] * 2) for dtype in (torch.float16, torch.bfloat16)]
        return torch.dot(low[0], x[0]), added, torch.cat([low, x]), F.linear(x.double(), x), *halves


class _Composite(nn.Module):
    """Operations without a rule that call some with one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIDE, SIDE))
        self.table = nn.Parameter(torch.randn(3, SIDE, SIDE))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        first = torch.einsum("ij,kj->ki", x, self.weight)
        second = torch.tensordot(x, self.weight, dims=1)
        third = torch.einsum("ij,ij->i", x, x)
        return (
            first,
            second,
            third,
            torch.inner(x, self.weight),
            self.table[1] @ x.t(),
            x @ self.weight.t(),
        )


class _Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.layer = kind(SIDE, SIDE, 2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)


class _Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(SIDE, 2, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(SIDE, 2, 16, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x, x, x), self.encoder(x)


def _convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.SiLU(),
        nn.GroupNorm(2, 8),
        nn.MaxPool2d(2),
        nn.Upsample(scale_factor=2),
        nn.ConvTranspose2d(8, 4, 2, stride=2),
        nn.PReLU(4),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        parametrizations.weight_norm(nn.Linear(16, 5)),
        nn.LogSoftmax(-1),
    )


def _square() -> tuple[Tensor]:
    return (torch.randn(5, SIDE),)


def _sequence() -> tuple[Tensor]:
    return (torch.randn(2, 5, SIDE),)


MODELS = {
    "tied": Model(_Tied, lambda: (torch.randint(11, (2, 5)),)),
    "regions": Model(_Regions, _square),
    "branches": Model(_Branches, _square),
    "loops": Model(_Loops, _square),
    "writes": Model(_Writes, _square),
    "mixed": Model(_Mixed, _square),
    "composite": Model(_Composite, _square),
    "convolutional": Model(_convolutional, lambda: (torch.randn(2, 3, 8, 8),)),
    "attention": Model(_Attending, _sequence),
    "GRU": Model(lambda: _Recurrent(nn.GRU), _sequence),
    "LSTM": Model(lambda: _Recurrent(nn.LSTM), _sequence),
    "RNN": Model(lambda: _Recurrent(nn.RNN), _sequence),
}

_ROWS = {"softmax": "fp32", "layer_norm": "lower", "silu": "fp32", "mean": "lower", "exp": "fp32"}
POLICIES = {
    "torch": Policy.load("torch"),
    "default": Policy.load("default"),
    "lean": Policy.load("lean"),
    "rows": Policy.load("default").replace(name="rows", ops=_ROWS),
    "like cuda": Policy.load("default").retarget("cpu", like="cuda"),
    "modules": Policy.load("default").replace(
        name="modules",
        modules={
            "**.norm": "fp32",
            "**.layer": {"dtype": "float16", "ops": {"add": "fp32"}},
            "**.out": "fp32",
            "last": "float16",
            "10": {"ops": {"linear": "fp32"}},
        },
    ),
}
