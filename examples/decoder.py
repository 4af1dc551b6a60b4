"""A decoder of two blocks that learns to go on with a text, for `precast tune`.

precast tune decoder:make --data batches --loss loss --optimizer AdamW,lr=0.001 --objective memory --tolerance 2%
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Causal attention, and two linear layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        """`x` and the result have shape (batch, length, width)."""
        q, k, v = self.qkv(self.before(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        made: Tensor = x + self.down(F.gelu(self.up(self.between(x))))
        return made


class Decoder(nn.Module):
    """Guesses the next byte at each place."""

    def __init__(self, width: int = 192, blocks: int = 2) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(256, width), nn.Embedding(96, width)
        self.blocks = nn.Sequential(*(Block(width, 6) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of all bytes, of shape (batch, length, 256)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.embedding(tokens) + self.places(places))
        scores: Tensor = self.head(self.norm(x))
        return scores


def make() -> nn.Module:
    """The model."""
    torch.manual_seed(0)
    return Decoder()


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Pieces of the license, each with what follows."""
    path = pathlib.Path(__file__).parent.parent / "LICENSE"
    text = torch.tensor(list(path.read_bytes()))
    generator = torch.Generator().manual_seed(0)
    for _ in range(16):
        starts = torch.randint(len(text) - 97, (8,), generator=generator)
        rows = torch.stack([text[s : s + 97] for s in starts])
        yield rows[:, :-1], rows[:, 1:]


def loss(output: Tensor, target: Tensor) -> Tensor:
    """The cross-entropy of all places."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())
