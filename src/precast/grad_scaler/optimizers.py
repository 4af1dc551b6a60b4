"""Steps of optimizers that decide on the device (fused ones).

PyTorch has had two contracts with fused optimizers. In the first, their `step` has a parameter for the scaler, and gets
scale and found_inf from it. In the second, it reads them from the attributes `grad_scale` and `found_inf`.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, strided
from torch.optim import SGD, Optimizer

from precast import _torch
from precast._internal.callers import callers_level
from precast.errors import PrecastWarning
from precast.optim.low_precision_weights import learns_by_rounding
from precast.optim.partial_steps import parameters_of

__all__ = ["prepare_fused_step", "step_given_scaler", "takes_scaler", "temporary_attributes"]


def takes_scaler(optimizer: Optimizer) -> bool:
    """Return True if the optimizer's `step` has a parameter for the scaler: the first contract."""
    return "grad_scaler" in inspect.signature(optimizer.step).parameters


def step_given_scaler(
    scaler: Any, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> float | None:
    """Step an optimizer that takes the scaler, with PyTorch's deprecation warning."""
    warnings.warn(_torch.old_contract_warning(), FutureWarning, stacklevel=callers_level())
    result: float | None = optimizer.step(*args, **{**kwargs, "grad_scaler": scaler})
    return result


@contextmanager
def temporary_attributes(optimizer: Optimizer, **attributes: Any) -> Iterator[None]:
    """Set attributes that the optimizer reads in `step`, and delete them when the `with` block ends."""
    for name, value in attributes.items():
        setattr(optimizer, name, value)
    try:
        yield
    finally:
        for name in attributes:
            delattr(optimizer, name)


@torch.no_grad()
def prepare_fused_step(optimizer: Optimizer) -> None:
    """Work around two faults of PyTorch's fused kernels on the CPU (2.13).

    They read the memory of a gradient as if it had the layout of its parameter, so a gradient in another layout is
    copied. The kernel of SGD does not write most values of 16-bit parameters, which gives a warning.
    """
    for parameter in parameters_of(optimizer):
        gradient = parameter.grad
        if not parameter.is_cpu or type(gradient) is not Tensor or gradient.layout is not strided:
            continue
        if gradient.stride() != parameter.stride() and _differ_in_layout(gradient, parameter):
            copy = torch.empty_strided(parameter.shape, parameter.stride(), dtype=gradient.dtype)
            parameter.grad = copy.copy_(gradient)
        is_narrow = parameter.dtype in _torch.SIXTEEN_BIT and not learns_by_rounding(parameter)
        if is_narrow and isinstance(optimizer, SGD):
            _warn_of_fused_sgd(parameter.dtype)


def _differ_in_layout(one: Tensor, other: Tensor) -> bool:
    strides = zip(one.shape, one.stride(), other.stride(), strict=True)
    return any(size > 1 and mine != theirs for size, mine, theirs in strides)


@functools.cache
def _warn_of_fused_sgd(dtype: torch.dtype) -> None:
    if not _torch.fused_sgd_writes(dtype):
        warnings.warn(
            f"PyTorch's fused SGD on the CPU leaves most values of {dtype} parameters unchanged, so they do not learn. "
            "Make the optimizer with fused=False.",
            PrecastWarning,
            stacklevel=callers_level(),
        )
