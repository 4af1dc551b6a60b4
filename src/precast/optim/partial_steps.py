"""What it takes to call an optimizer's step for some of its parameters, or for others in their place.

Invariants: nothing here steps anything; what is hidden from an optimizer, or read of it, is there again afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer, SparseAdam

__all__ = [
    "called_before",
    "closure_of",
    "counts_of",
    "is_large",
    "outside_autocast",
    "parameters_of",
    "set_gradient",
    "treats_each_parameter_by_itself",
    "without_scaler",
]

PLAIN: Final = (int, float, bool, str, type(None))
"""What an optimizer may count in; whether a step changes it is looked at."""
_OF_SCALER: Final = ("grad_scale", "found_inf")


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of all groups of an optimizer, in their order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def treats_each_parameter_by_itself(optimizer: Optimizer) -> bool:
    """Whether a step may be called for a few parameters at a time: for those of PyTorch, whose code is known."""
    step = type(optimizer).step
    return step.__module__.startswith("torch.optim.") and not isinstance(optimizer, SparseAdam)


def is_large(value: Any) -> bool:
    """Whether a state is a tensor of several numbers, and not a count."""
    return isinstance(value, Tensor) and value.numel() > 1


def counts_of(optimizer: Optimizer) -> dict[str, Any]:
    """The plain values among an optimizer's attributes, in which it may count its steps."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if type(value) in PLAIN and name not in _OF_SCALER
    }


def set_gradient(parameter: Tensor, gradient: Tensor | None) -> None:
    """Gives a parameter a gradient of whatever dtype, or none."""
    parameter.grad = None
    parameter.grad_dtype = torch.float32 if gradient is None else gradient.dtype
    parameter.grad = gradient


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The closure that a step is called with, from what its hook gets; None where there is none."""
    return kwargs.get("closure", args[1] if len(args) > 1 else None)


def called_before(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a step whose closure has been called: its gradients are there, it gives only the loss."""
    closure = closure_of(args, kwargs)
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    return (args[0], *args[2:]), {**kwargs, "closure": lambda: loss}


@contextmanager
def outside_autocast() -> Iterator[None]:
    """A block in which no region casts what a step computes."""
    if torch.is_autocast_enabled("cpu"):
        with torch.autocast("cpu", enabled=False):
            yield
    else:
        yield


@contextmanager
def without_scaler(optimizer: Optimizer) -> Iterator[None]:
    """Hides what a scaler has told a fused step, which is then done by who calls it."""
    its = vars(optimizer)
    told: dict[str, Any] = {name: its.pop(name) for name in _OF_SCALER if name in its}
    try:
        yield
    finally:
        its.update(told)
