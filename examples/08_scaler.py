"""Gradients too small for float16: lost without a scaler, kept with one, and what the scaler does meanwhile."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from showing import say, table
from torch import Tensor, nn
from torch.nn import functional as F

import precast

STEPS = 50


@dataclass(frozen=True)
class Run:
    """How training went.

    Attributes:
        losses: the loss of each step.
        zeros: of the latest finite gradients, the share that is 0.
        scales: the scale of each step.
        skipped: how many steps the scaler skipped.
    """

    losses: list[float]
    zeros: float
    scales: list[float]
    skipped: int


def network() -> nn.Sequential:
    """The same weights in each run; outputs begin near 0."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
    with torch.no_grad():
        for parameter in model[2].parameters():
            parameter.mul_(1e-4)
    return model


def data() -> tuple[Tensor, Tensor]:
    """Inputs and small targets, (2048, 8).

    The gradient of a mean over 16384 numbers is 2 / 16384 of each difference, and differences of
    1e-4 make that 1.2e-8: float16 has nothing between 0 and 6e-8.
    """
    torch.manual_seed(1)
    x = torch.randn(2048, 8)
    return x, 1e-4 * x.sin()


def train(dtype: torch.dtype | None, scaler: precast.GradScaler) -> Run:
    """Trains in a region of `dtype`; None is float32, without a region."""
    model, (x, target) = network(), data()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-5, eps=1e-12)
    losses, scales, zeros = [], [], math.nan
    for _ in range(STEPS):
        optimizer.zero_grad()
        with precast.autocast("cpu", dtype=dtype) if dtype else nullcontext():
            loss = F.mse_loss(model(x), target)
        scales.append(scaler.get_scale())
        scaler.scale(loss).backward()
        share = share_of_zeros(model)
        zeros = zeros if math.isnan(share) else share
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return Run(losses, zeros, scales, scaler.counters.skipped)


def share_of_zeros(model: nn.Module) -> float:
    """Of the gradients of all weights, the share that is exactly 0; nan if some are not finite."""
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return (gradients == 0).float().mean().item() if gradients.isfinite().all() else math.nan


def a_scaler(
    enabled: bool = True, init_scale: float | Literal["auto"] = 2.0**16
) -> precast.GradScaler:
    """A scaler that raises its scale after 10 good steps, to be seen doing it."""
    return precast.GradScaler("cpu", enabled=enabled, init_scale=init_scale, growth_interval=10)


def main() -> None:
    """Prints what is lost, and what is learnt."""
    runs = {
        "float32": train(None, a_scaler(enabled=False)),
        "float16, no scaler": train(torch.float16, a_scaler(enabled=False)),
        "float16, scaler from 2^16": train(torch.float16, a_scaler()),
        "float16, scaler from 2^40": train(torch.float16, a_scaler(init_scale=2.0**40)),
        'float16, scaler "auto"': train(torch.float16, a_scaler(init_scale="auto")),
        "bfloat16, no scaler": train(torch.bfloat16, a_scaler(enabled=False)),
    }
    table(
        ("", "zeros", "first loss", "last loss", "skipped", "last scale"),
        *(
            (name, f"{r.zeros:.1%}", r.losses[0], r.losses[-1], r.skipped, r.scales[-1])
            for name, r in runs.items()
        ),
    )
    say(
        "Without a scale nothing reaches the weights, and nothing says so. A scale that is "
        "too high costs skipped steps until it fits; one that is found by measuring costs "
        "few."
    )


if __name__ == "__main__":
    main()
