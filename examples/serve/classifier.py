"""A small classifier, and how it is made for `precast export`: with the weights that train.py has saved.

Invariants: the factory needs nothing but the file of weights; it gives the model and an example of its arguments.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["POINTS", "WEIGHTS", "Classifier", "build"]

WEIGHTS = "classifier.pt"
POINTS = "points.pt"


class Classifier(nn.Module):
    """Says in which of four quarters most points of a set lie."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.points = nn.Sequential(nn.Linear(2, width), nn.GELU(), nn.Linear(width, width))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4))

    def forward(self, points: Tensor) -> Tensor:
        """A number for each quarter, the largest for the likeliest."""
        answer: Tensor = self.head(self.points(points).mean(1))
        return answer


def build() -> tuple[nn.Module, Tensor]:
    """The trained model, and an example of its input."""
    model = Classifier()
    model.load_state_dict(torch.load(WEIGHTS))
    torch.manual_seed(1)
    return model, torch.randn(8, 32, 2)
