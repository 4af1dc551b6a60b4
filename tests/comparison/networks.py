"""Small networks of seven kinds, whose parts have settings that a fault changes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, TOKENS, BATCH, CLASSES = 32, 12, 4, 20


class Dense(nn.Linear):
    """A linear layer, as most layers of the networks."""

    rounds_input = False
    stale: Tensor | None = None
    parts = 1
    is_imprecise = False

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.stale is None else self.stale
        if self.rounds_input:
            x = x.to(torch.bfloat16).to(torch.float32)
        if self.parts == 1:
            out = F.linear(x, weight, self.bias)
        else:  # another order of summation
            pieces = zip(x.chunk(self.parts, -1), weight.chunk(self.parts, -1), strict=True)
            out = sum(F.linear(a, b) for a, b in pieces) + self.bias
        return Imprecise.apply(out) if self.is_imprecise else out


class Imprecise(torch.autograd.Function):
    """An operation that rounds to 11 bits, as TF32 does."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return (x.view(torch.int32) & -8192).view(torch.float32)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Norm(nn.Module):
    """A layer norm by hand in float64, so that a cast can lack."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.eps = 1e-3
        self.dtype = torch.float64

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(self.dtype)
        centered = wide - wide.mean(-1, keepdim=True)
        scaled = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + self.eps)
        return scaled.to(torch.float32) * self.weight + self.bias


class Drop(nn.Dropout):
    """A dropout, before which other code may draw random numbers."""

    draws = 0

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.draws):
            torch.rand(1)
        return super().forward(x)


class Attention(nn.Module):
    """Attention by hand."""

    def __init__(self, width: int, heads: int = 4, *, causal: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = Dense(width, 3 * width), Dense(width, width)
        self.heads, self.causal = heads, causal
        self.scale = 1 / math.sqrt(width // heads)
        self.diagonal, self.fill, self.dim, self.swaps = 0, -math.inf, -1, False

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = (self._split(part) for part in self.qkv(x).chunk(3, -1))
        scores = (q @ k.transpose(-1, -2)) * self.scale
        if self.causal:
            mask = torch.ones(tokens, tokens).tril(self.diagonal) == 0
            scores = scores.masked_fill(mask, self.fill)
        out = scores.softmax(self.dim) @ v
        return self.out(out.transpose(1, 2).reshape(batch, tokens, width))

    def _split(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        if self.swaps:  # heads and tokens mixed up
            return x.reshape(batch, self.heads, tokens, width // self.heads)
        return x.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int, *, causal: bool = False, drops: float = 0.1) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(width), Norm(width)
        self.attention = Attention(width, causal=causal)
        self.up, self.down = Dense(width, 2 * width), Dense(2 * width, width)
        self.drop = Drop(drops)
        self.approximate, self.residual, self.detaches = "none", 1.0, False

    def forward(self, x: Tensor) -> Tensor:
        x = self._add(x, self.drop(self.attention(self.norm1(x))))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate=self.approximate))

    def _add(self, x: Tensor, y: Tensor) -> Tensor:
        if self.residual != 1.0:
            y = y * self.residual
        return (x.detach() if self.detaches else x) + y


class Positions(nn.Module):
    """Positions as sines."""

    dtype = torch.float32

    def forward(self, x: Tensor) -> Tensor:
        tokens, width = x.shape[-2:]
        position = torch.arange(1000, 1000 + tokens).to(self.dtype).to(torch.float32)
        frequency = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        angle = position[:, None] * frequency
        return x + torch.cat([angle.sin(), angle.cos()], -1)


class Decoder(nn.Module):
    """A language model with a causal mask."""

    causal = True

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(CLASSES, WIDTH), Positions()
        self.blocks = nn.ModuleList(Block(WIDTH, causal=self.causal) for _ in range(2))
        self.norm, self.head = Norm(WIDTH), Dense(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.positions(self.embed(x))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).flatten(0, 1)


class Bert(Decoder):
    """An encoder without a mask."""

    causal = False


class Vit(nn.Module):
    """An image classifier with patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.positions = nn.Conv2d(3, WIDTH, 4, 4), Positions()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.norm, self.head = Norm(WIDTH), Dense(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.positions(self.patch(x).flatten(2).transpose(1, 2))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class UNet(nn.Module):
    """Convolutions with a connection across."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 16, 3, 2, 1)
        self.bn1, self.bn2 = nn.BatchNorm2d(16), nn.BatchNorm2d(16)
        self.middle, self.drop = nn.Conv2d(16, 16, 3, 1, 1), Drop(0.1)
        self.up, self.head = nn.ConvTranspose2d(32, 8, 2, 2), Dense(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        first = self.bn1(self.down(x)).relu()
        second = self.drop(self.bn2(self.middle(first)).relu())
        x = self.up(torch.cat([first, second], 1))
        return self.head(x.mean((2, 3)))


class Gat(nn.Module):
    """Attention over the edges of a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = Dense(8, WIDTH), Dense(WIDTH, WIDTH), Dense(WIDTH, CLASSES)
        self.left, self.right = Dense(WIDTH, 1), Dense(WIDTH, 1)
        self.norm, self.slope = Norm(WIDTH), 0.2

    def forward(self, x: Tensor) -> Tensor:
        nodes = x.shape[0]
        edges = (torch.arange(nodes)[:, None] - torch.arange(nodes)).abs() < 3
        for layer in (self.one, self.two):
            x = layer(x)
            scores = F.leaky_relu(self.left(x) + self.right(x).T, self.slope)
            x = F.elu(scores.masked_fill(~edges, -math.inf).softmax(-1) @ x)
        return self.head(self.norm(x))


class Rnn(nn.Module):
    """A recurrent network."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell = (
            nn.Embedding(CLASSES, WIDTH),
            nn.LSTM(WIDTH, WIDTH, batch_first=True),
        )
        self.drop, self.norm, self.head = Drop(0.1), Norm(WIDTH), Dense(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.cell(self.embed(x))
        return self.head(self.norm(self.drop(out))).flatten(0, 1)


class Moe(nn.Module):
    """Experts, of which each token uses two."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(CLASSES, WIDTH), Norm(WIDTH)
        self.gate = Dense(WIDTH, 4)
        self.experts = nn.ModuleList(Dense(WIDTH, WIDTH) for _ in range(4))
        self.head, self.top = Dense(WIDTH, CLASSES), 2

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.embed(x)).flatten(0, 1)
        weights, chosen = self.gate(x).softmax(-1).topk(self.top, -1)
        every = torch.stack([expert(x).relu() for expert in self.experts], 1)
        picked = every.gather(1, chosen[..., None].expand(-1, -1, WIDTH))
        return self.head((picked * weights[..., None]).sum(1) + x)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "decoder": Decoder,
    "bert": Bert,
    "vit": Vit,
    "unet": UNet,
    "gat": Gat,
    "rnn": Rnn,
    "moe": Moe,
}


def batch_for(name: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return random inputs and labels of a network."""
    if name in {"vit", "unet"}:
        inputs = torch.randn(BATCH, 3, 16, 16, generator=generator)
        return inputs, torch.randint(0, CLASSES, (BATCH,), generator=generator)
    if name == "gat":
        inputs = torch.randn(24, 8, generator=generator)
        return inputs, torch.randint(0, CLASSES, (24,), generator=generator)
    tokens = torch.randint(0, CLASSES, (BATCH, TOKENS), generator=generator)
    return tokens, torch.randint(0, CLASSES, (BATCH * TOKENS,), generator=generator)
