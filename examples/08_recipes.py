"""Accumulating, clipping, and a penalty on gradients, under a scaler: the gradients are float32's, nearly.

Each recipe returns the gradients that the optimizer would step with, divided by the scale.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from showing import say, table
from torch import Tensor, nn
from torch.nn import functional as F

import precast

Lower = torch.dtype | None
"""What a region lowers to; None switches it off: float32."""

Recipe = Callable[[nn.Module, Tensor, Tensor, Lower], list[Tensor]]
MICRO_BATCHES, MAX_NORM, SCALE = 4, 0.1, 2.0**12


def region(dtype: Lower) -> precast.autocast:
    """A region in `dtype`, or none."""
    return precast.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None)


def prepared(model: nn.Module, dtype: Lower) -> tuple[torch.optim.Optimizer, precast.GradScaler]:
    """An optimizer, and a scaler that is on for float16 alone."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    enabled = dtype == torch.float16
    return optimizer, precast.GradScaler("cpu", enabled=enabled, init_scale=SCALE)


def gradients(model: nn.Module) -> list[Tensor]:
    """A copy of what backward left in the parameters."""
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def whole_batch(model: nn.Module, x: Tensor, target: Tensor, dtype: Lower) -> list[Tensor]:
    """No recipe: one loss of all samples."""
    optimizer, scaler = prepared(model, dtype)
    with region(dtype):
        loss = F.mse_loss(model(x), target)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    return gradients(model)


def accumulated(model: nn.Module, x: Tensor, target: Tensor, dtype: Lower) -> list[Tensor]:
    """Parts of the batch in turn: each loss divided by their number, unscaled once."""
    optimizer, scaler = prepared(model, dtype)
    parts = zip(x.chunk(MICRO_BATCHES), target.chunk(MICRO_BATCHES), strict=True)
    for part, aim in parts:
        with region(dtype):
            loss = F.mse_loss(model(part), aim) / MICRO_BATCHES
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    return gradients(model)


def clipped(model: nn.Module, x: Tensor, target: Tensor, dtype: Lower) -> list[Tensor]:
    """The scaler divides by the scale first, so that the limit means what it says."""
    optimizer, scaler = prepared(model, dtype)
    with region(dtype):
        loss = F.mse_loss(model(x), target)
    scaler.scale(loss).backward()
    scaler.clip_grad_norm_(optimizer, MAX_NORM)
    return gradients(model)


def clipped_too_early(model: nn.Module, x: Tensor, target: Tensor, dtype: Lower) -> list[Tensor]:
    """The mistake: the limit is held against scaled gradients, and the division follows."""
    optimizer, scaler = prepared(model, dtype)
    with region(dtype):
        loss = F.mse_loss(model(x), target)
    scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    scaler.unscale_(optimizer)
    return gradients(model)


def penalised(model: nn.Module, x: Tensor, target: Tensor, dtype: Lower) -> list[Tensor]:
    """The loss plus the norm of its gradient, which is divided by the scale."""
    optimizer, scaler = prepared(model, dtype)
    with region(dtype):
        loss = F.mse_loss(model(x), target)
    parameters = list(model.parameters())
    scaled = torch.autograd.grad(scaler.scale(loss), parameters, create_graph=True)
    with region(dtype):
        penalty = torch.cat([(g / scaler.get_scale()).flatten() for g in scaled]).norm()
        total = loss + penalty
    scaler.scale(total).backward()
    scaler.unscale_(optimizer)
    return gradients(model)


RECIPES: dict[str, Recipe] = {
    "whole batch": whole_batch,
    f"{MICRO_BATCHES} micro-batches": accumulated,
    f"clipped to {MAX_NORM}": clipped,
    "  the mistake: before unscaling": clipped_too_early,
    "gradient penalty": penalised,
}


def norm(gradients: list[Tensor]) -> float:
    """Of all gradients together."""
    return float(torch.cat([gradient.flatten() for gradient in gradients]).norm())


def main() -> None:
    """Prints the norm of each recipe's gradients in each dtype."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    x = torch.randn(64, 8)
    target = x.sum(1, keepdim=True).sin()
    rows = [
        (name, *(norm(recipe(model, x, target, d)) for d in (None, torch.float16, torch.bfloat16)))
        for name, recipe in RECIPES.items()
    ]
    table(("norm of the gradients", "float32", "float16, scale 4096", "bfloat16"), *rows)
    say("The same in all three, but for the mistake, which float32 and bfloat16 do not show.")


if __name__ == "__main__":
    main()
