"""Modules: y = 5 x + 3 found by parameters of one's own, by `nn.Linear`, and by `nn.Sequential`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from showing import Region, mixed, plain, say, table
from torch import Tensor, nn
from torch.nn import functional as F

STEPS, BATCH = 200, 64


class Line(nn.Module):
    """A slope and an intercept. Elementwise: a region changes nothing here."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.randn(1))
        self.intercept = nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        """The line at x, (batch, 1)."""
        return x * self.slope + self.intercept


MODELS: dict[str, Callable[[], nn.Module]] = {
    "parameters": Line,
    "nn.Linear": lambda: nn.Linear(1, 1),
    "nn.Sequential": lambda: nn.Sequential(nn.Linear(1, 8), nn.Linear(8, 1)),
}


@dataclass(frozen=True)
class Fit:
    """What training found, and in which dtypes it ran."""

    slope: float
    intercept: float
    output: torch.dtype
    parameters: torch.dtype
    gradients: torch.dtype


def fit(make: Callable[[], nn.Module], region: Region, seed: int = 0) -> Fit:
    """Trains a fresh model; the line it found is read off in float32."""
    torch.manual_seed(seed)
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in range(STEPS):
        x = torch.rand(BATCH, 1) * 2 - 1
        optimizer.zero_grad()
        with region():
            output = model(x)
            loss = F.mse_loss(output, 5 * x + 3)
        loss.backward()
        optimizer.step()
        scheduler.step()
    with torch.no_grad():
        at_0, at_1 = model(torch.tensor([[0.0], [1.0]]))[:, 0].tolist()
    parameter = next(model.parameters())
    assert parameter.grad is not None
    return Fit(at_1 - at_0, at_0, output.dtype, parameter.dtype, parameter.grad.dtype)


def main() -> None:
    """Prints a line for each model, without and with a region."""
    rows = []
    for name, make in MODELS.items():
        for kind, region in (("float32", plain), ("bfloat16 region", mixed)):
            found = fit(make, region)
            line = f"{found.slope:.3f} x + {found.intercept:.3f}"
            rows.append((name, kind, line, found.output, found.parameters, found.gradients))
    table(("y = 5 x + 3 by", "", "found", "output", "weights", "gradients"), *rows)
    say(
        "The region rounds what nn.Linear computes. Weights, their gradients and the loss "
        "stay float32, so the same line is found, and the optimizer needs no change."
    )


if __name__ == "__main__":
    main()
