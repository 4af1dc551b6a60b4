"""Small trainings for the scaler's tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from precast.grad_scaler.scaler import GradScaler

Tensor = torch.Tensor

KINDS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.1),
    "foreach adam": lambda ps: torch.optim.Adam(ps, lr=0.1, foreach=True),
    "fused adam": lambda ps: torch.optim.Adam(ps, lr=0.1, fused=True),
    "fused adamw": lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True),
    # Without momentum: where its first step is skipped, PyTorch's fused SGD leaves its momentum
    # uninitialised, whoever's scaler it is under.
    "fused sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, fused=True),
    "fused adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1, fused=True),
}


def make_parameter(size: int = 3, **kwargs: Any) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(size, **kwargs))


def sgd(parameter: Tensor, **kwargs: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter], lr=0.25, **kwargs)


def started(
    kind: type[Any] = GradScaler, **kwargs: Any
) -> tuple[Any, torch.nn.Parameter, torch.optim.Optimizer]:
    """A scaler of a class after one backward, with the parameter and the optimizer that it is for."""
    parameter = make_parameter()
    scaler = kind("cpu", **kwargs)
    scaler.scale((parameter * 2).sum()).backward()
    return scaler, parameter, sgd(parameter)


def bits(value: Any) -> Any:
    """Something that is equal only for the same bits, NaN included."""
    if isinstance(value, Tensor):
        return (
            value.dtype,
            value.shape,
            value.detach().contiguous().flatten().view(torch.uint8).tolist(),
        )
    return value
