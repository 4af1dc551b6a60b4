"""Trains the classifier in mixed precision; saves its float32 weights, and points that it has not seen."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from classifier import POINTS, WEIGHTS, Classifier
from torch import Tensor

import precast


def batch(size: int = 256) -> tuple[Tensor, Tensor]:
    """Sets of points around one of four centres, and which it is."""
    quarter = torch.randint(4, (size,))
    centre = torch.stack([quarter % 2, quarter // 2], -1) * 2.0 - 1.0
    return torch.randn(size, 32, 2) + 0.5 * centre[:, None], quarter


def main() -> None:
    """Trains a hundred steps."""
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(100):
        points, quarter = batch()
        with precast.autocast("cpu", policy="default"):
            loss = F.cross_entropy(model(points), quarter)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.save(model.state_dict(), WEIGHTS)
    torch.save(batch(8)[0], POINTS)
    print(f"loss {loss.item():.2f}, weights in {WEIGHTS}, what is to be answered in {POINTS}")


if __name__ == "__main__":
    main()
