"""Several models, losses and optimizers under one scaler; and a scale for each loss where sizes differ."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from showing import say, table
from torch import Tensor, nn
from torch.nn import functional as F

import precast


@dataclass(frozen=True)
class Step:
    """What one iteration did to each of the two models."""

    moved: tuple[bool, bool]
    scale_before: float
    scale_after: float


def two_models(broken: bool) -> Step:
    """Two models, two losses that both see the first, two optimizers, one scaler.

    Args:
        broken: whether the gradients of the second model overflow.
    """
    torch.manual_seed(0)
    models = [nn.Linear(4, 1), nn.Linear(4, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    scaler = precast.GradScaler("cpu", init_scale=1024.0)
    weights = [model.weight.clone() for model in models]
    x = torch.randn(16, 4)
    with precast.autocast("cpu", dtype=torch.float16):
        first, second = (model(x) for model in models)
        both = first.detach() + second
        losses = F.mse_loss(first, x[:, :1]), F.mse_loss(both, x[:, 1:2])
    for loss in losses:
        scaler.scale(loss).backward()
    if broken:
        assert models[1].weight.grad is not None
        models[1].weight.grad[0, 0] = torch.inf
    for optimizer in optimizers:
        scaler.step(optimizer)
    before = scaler.get_scale()
    scaler.update()
    pairs = zip(models, weights, strict=True)
    moved = [not torch.equal(model.weight, weight) for model, weight in pairs]
    return Step((moved[0], moved[1]), before, scaler.get_scale())


SIZES = {"large": 1.0, "tiny": 3e-10}


def losses_of(model: nn.Module, x: Tensor, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Two losses of one model, of very different size."""
    with precast.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        output = model(x)
        values = {"large": output[:, :1].float(), "tiny": output[:, 1:].float()}
        return {name: size * values[name].square().mean() for name, size in SIZES.items()}


def gradients_in_float32(model: nn.Module, x: Tensor) -> Tensor:
    """What both losses together give without mixed precision."""
    model.zero_grad()
    torch.stack(list(losses_of(model, x, None).values())).sum().backward()
    return _gradient(model)


def gradients_with_one_scale(model: nn.Module, x: Tensor, scale: float = 1024.0) -> Tensor:
    """The same in float16, under one scale that suits the large loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = precast.GradScaler("cpu", init_scale=scale)
    optimizer.zero_grad()
    for loss in losses_of(model, x, torch.float16).values():
        scaler.scale(loss).backward(retain_graph=True)
    scaler.unscale_(optimizer)
    return _gradient(model)


def gradients_with_a_scale_each(model: nn.Module, x: Tensor) -> Tensor:
    """The same in float16, with a scale for each loss, found in the first iterations."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # leaves weights alone
    scalers = precast.LossScalers("cpu", list(SIZES), init_scale="auto")
    for _ in range(4):
        optimizer.zero_grad()
        for name, loss in losses_of(model, x, torch.float16).items():
            scalers.backward(name, loss, optimizer, retain_graph=True)
        scalers.step(optimizer)
        scalers.update()
    return _gradient(model)


def _gradient(model: nn.Module) -> Tensor:
    (weight,) = model.parameters()
    assert weight.grad is not None
    return weight.grad.clone()


def error(found: Tensor, exact: Tensor) -> float:
    """The distance beside the exact length."""
    return float((found - exact).norm() / exact.norm())


def main() -> None:
    """Prints which optimizers step, and which losses keep their gradients."""
    rows = []
    for name, broken in (("both gradients finite", False), ("the second infinite", True)):
        step = two_models(broken)
        did = ["steps" if moved else "skipped" for moved in step.moved]
        rows.append((name, *did, step.scale_before, step.scale_after))
    table(("two models, one scaler", "first", "second", "scale", "afterwards"), *rows)
    torch.manual_seed(0)
    model, x = nn.Linear(4, 2, bias=False), torch.randn(16, 4)
    exact = gradients_in_float32(model, x)
    found = {
        "one scale, 1024": gradients_with_one_scale(model, x),
        "a scale for each loss": gradients_with_a_scale_each(model, x),
    }
    table(
        ("error of float16's gradients of", "a loss of 1", f"a loss of {SIZES['tiny']:g}"),
        *(
            (name, *(f"{error(gradient[row], exact[row]):.1%}" for row in (0, 1)))
            for name, gradient in found.items()
        ),
    )
    say("One scale suits one size of loss: 1024 leaves a tiny one's gradients few bits.")


if __name__ == "__main__":
    main()
