"""Optimizers: how a step is recognised and run, and what it does about a scaler.

Invariants:

- nothing here changes an optimizer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType
from typing import Any, Final

import torch

__all__ = [
    "handles_scaling",
    "is_optimizer_step",
    "step_without_hooks",
    "warning_of_old_contract",
]

_OPTIMIZER: Final = sys.modules["torch.optim.optimizer"].__file__


def is_optimizer_step(code: CodeType) -> bool:
    """Whether it is what wraps every optimizer's `step`."""
    return code.co_name == "wrapper" and code.co_filename == _OPTIMIZER


def step_without_hooks(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """The optimizer's own step, for a part of its parameters.

    What `Optimizer.step` wraps has no public name; around it are only hooks and a mark for the profiler (2.13).
    """
    step = type(optimizer).step
    inside = getattr(step, "__wrapped__", step)
    return lambda: inside(optimizer)


def handles_scaling(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step` of this optimizer unscales and decides itself; the mark of fused optimizers since 1.13."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def warning_of_old_contract() -> str:
    """What PyTorch's scaler says where an optimizer's step takes the scaler; only its code has the text (2.13)."""
    texts = torch.amp.GradScaler.step.__code__.co_consts
    said = [t for t in texts if isinstance(t, str) and t.startswith("GradScaler is going to stop")]
    return said[0] if said else "GradScaler is going to stop passing itself to optimizers' step."
