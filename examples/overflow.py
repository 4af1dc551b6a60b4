"""A program to make a report of: a small decoder learns in float16, and one of its layers overflows in step 41.

    precast run --health examples/overflow.py

It knows nothing of precast. The fault is planted: a weight is a hundred thousand times too large for one step.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, LENGTH, WORDS = 32, 2, 16, 48
STEPS, FAULT = 60, 41


class Attention(nn.Module):
    """Causal attention, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """`x` and the result have shape (batch, length, width)."""
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = F.softmax(scores.masked_fill(later, float("-inf")), -1)
        out: Tensor = self.out((weights @ v).transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """Attention, and a network of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """`x` and the result have shape (batch, length, width)."""
        x = x + self.attention(self.norm1(x))
        added: Tensor = x + self.mlp(self.norm2(x))
        return added


class Decoder(nn.Module):
    """Says which word comes next."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        """Words, shape (batch, length), to logits, shape (batch, length, words)."""
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def main() -> None:
    """Trains on sums modulo the number of words."""
    torch.manual_seed(0)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=20)
    text = torch.randint(0, 3, (64, LENGTH + 1)).cumsum(1) % WORDS
    faulty = model.get_parameter("blocks.2.mlp.2.weight")
    for step in range(STEPS):
        factor = {FAULT: 1e5, FAULT + 1: 1e-5}.get(step, 1.0)
        with torch.no_grad():
            faulty.mul_(factor)
        batch = text[torch.randint(0, len(text), (8,))]
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    print(f"loss {loss.item():.2f}")


if __name__ == "__main__":
    main()
