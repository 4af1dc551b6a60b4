"""How an optimizer that decides on the device (a fused one) is stepped.

PyTorch has had two contracts with fused optimizers: their `step` takes the scaler and asks it for scale and found_inf,
or, since then, it reads them from the attributes `grad_scale` and `found_inf`.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from precast import _torch
from precast._internal.callers import callers_level

__all__ = ["step_given_scaler", "takes_scaler", "temporary_attributes"]


def takes_scaler(optimizer: Optimizer) -> bool:
    """Whether the optimizer's `step` has an argument for the scaler: the first contract."""
    return "grad_scaler" in inspect.signature(optimizer.step).parameters


def step_given_scaler(
    scaler: Any, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> float | None:
    """Steps an optimizer that takes the scaler, with PyTorch's warning that this is deprecated."""
    warnings.warn(_torch.warning_of_old_contract(), FutureWarning, stacklevel=callers_level())
    result: float | None = optimizer.step(*args, **{**kwargs, "grad_scaler": scaler})
    return result


@contextmanager
def temporary_attributes(optimizer: Optimizer, **attributes: Any) -> Iterator[None]:
    """Sets attributes that the optimizer reads in `step`, and deletes them when the `with` ends."""
    for name, value in attributes.items():
        setattr(optimizer, name, value)
    try:
        yield
    finally:
        for name in attributes:
            delattr(optimizer, name)
