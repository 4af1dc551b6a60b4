"""Automatic differentiation: a derivative, and a curve that Adam fits, in three precisions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from showing import Region, mixed, plain, say, short, table
from torch import Tensor

STEPS, RATE = 250, 0.5

Function = Callable[[Tensor], Tensor]


def derivative(function: Function, at: float, region: Region) -> float:
    """The slope of a function of one number."""
    x = torch.tensor([[at]], requires_grad=True)
    with region():
        y = function(x)
    (slope,) = torch.autograd.grad(y.sum(), x)
    return slope.item()


def negative_square(x: Tensor) -> Tensor:
    """-x^2 by an elementwise product: a region has no rule for it."""
    return -x * x


def negative_square_by_matmul(x: Tensor) -> Tensor:
    """-x^2 by a matrix product: a region rounds its inputs."""
    return -x @ x


def fit(region: Region = plain, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """The three coefficients that Adam finds for 5 x^2 + 3; `dtype` is theirs, and of the data."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(3, 1, generator=generator).to(dtype).requires_grad_()
    optimizer = torch.optim.Adam([weights], lr=RATE)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = RATE * (1 - step / STEPS)
        x = (torch.rand(64, generator=generator) * 4 - 2).to(dtype)
        target = 5 * x**2 + 3
        powers = torch.stack([x**2, x, torch.ones_like(x)], dim=1)
        optimizer.zero_grad()
        with region():
            loss = (powers @ weights)[:, 0].sub(target).square().mean()
        loss.backward()
        optimizer.step()
    return weights.detach()[:, 0]


def main() -> None:
    """Prints the derivatives, and what each precision learns."""
    table(
        ("d(-x^2)/dx", "exact", "float32", "region: -x * x", "region: -x @ x"),
        *(
            (
                f"at {at}",
                -2 * at,
                derivative(negative_square, at, plain),
                derivative(negative_square, at, mixed),
                derivative(negative_square_by_matmul, at, mixed),
            )
            for at in (1.0, 1.001, 3.14159)
        ),
    )
    runs = {
        "float32": fit(),
        "float32 weights, bfloat16 region": fit(mixed),
        "everything in bfloat16": fit(dtype=torch.bfloat16),
    }
    exact = torch.tensor([5.0, 0, 3])
    table(
        (f"5 x^2 + 0 x + 3 after {STEPS} steps", "x^2", "x", "1", "largest error"),
        *(
            (name, *(f"{w:.3f}" for w in found.tolist()), short((found - exact).abs().max().item()))
            for name, found in runs.items()
        ),
    )
    say(
        "Weights of 16 bits lose the updates that are smaller than half a step between two of "
        "their values: near 5 that step is 1/32. A region leaves weights in float32."
    )


if __name__ == "__main__":
    main()
