"""Calls of an optimizer's step for some of its parameters, or for stand-ins of them.

Invariants: no function here steps an optimizer; hidden attributes and gradients are restored afterwards.
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
"""Types of attributes in which an optimizer may count; their values are compared before and after a step."""
_OF_SCALER: Final = ("grad_scale", "found_inf")


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups of an optimizer, in their order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def treats_each_parameter_by_itself(optimizer: Optimizer) -> bool:
    """Return True if a step may be called for a few parameters at a time: only for PyTorch's optimizers."""
    step = type(optimizer).step
    return step.__module__.startswith("torch.optim.") and not isinstance(optimizer, SparseAdam)


def is_large(value: Any) -> bool:
    """Return True if a state is a tensor of several values, not a count."""
    return isinstance(value, Tensor) and value.numel() > 1


def counts_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return the plain values among an optimizer's attributes, which may count its steps."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if type(value) in PLAIN and name not in _OF_SCALER
    }


def set_gradient(parameter: Tensor, gradient: Tensor | None) -> None:
    """Give a parameter a gradient of any dtype, or none."""
    parameter.grad = None
    parameter.grad_dtype = torch.float32 if gradient is None else gradient.dtype
    parameter.grad = gradient


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the closure of a step, from the arguments of its hook; None if there is none."""
    return kwargs.get("closure", args[1] if len(args) > 1 else None)


def called_before(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Call the closure of a step; return its arguments with a closure that only returns the loss."""
    closure = closure_of(args, kwargs)
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    return (args[0], *args[2:]), {**kwargs, "closure": lambda: loss}


@contextmanager
def outside_autocast() -> Iterator[None]:
    """Disable autocast in a block, so that no region casts inside the step."""
    if torch.is_autocast_enabled("cpu"):
        with torch.autocast("cpu", enabled=False):
            yield
    else:
        yield


@contextmanager
def without_scaler(optimizer: Optimizer) -> Iterator[None]:
    """Hide the attributes that a scaler sets for a fused step, because the caller applies them."""
    attributes = vars(optimizer)
    hidden: dict[str, Any] = {
        name: attributes.pop(name) for name in _OF_SCALER if name in attributes
    }
    try:
        yield
    finally:
        attributes.update(hidden)
