"""Steps of optimizers that decide on the device (fused ones).

PyTorch has had two contracts with fused optimizers. In the first, their `step` has a parameter for the scaler, and gets
scale and found_inf from it. In the second, it reads them from the attributes `grad_scale` and `found_inf`.
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
