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
    """Whether this is the code of the function that wraps every optimizer's `step` (2.13)."""
    return code.co_name == "wrapper" and code.co_filename == _OPTIMIZER


def step_without_hooks(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """The optimizer's own step without its hooks, to be called for a part of its parameters.

    What PyTorch wraps has no public name; the wrapper adds only hooks and a mark for the profiler (2.13).
    """
    step = type(optimizer).step
    inside = getattr(step, "__wrapped__", step)
    return lambda: inside(optimizer)


def handles_scaling(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step` of this optimizer, as of all fused ones, unscales gradients and decides itself (2.13)."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def warning_of_old_contract() -> str:
    """PyTorch's warning about an optimizer whose step takes the scaler; only the code has this text (2.13)."""
    texts = torch.amp.GradScaler.step.__code__.co_consts
    said = [t for t in texts if isinstance(t, str) and t.startswith("GradScaler is going to stop")]
    return said[0] if said else "GradScaler is going to stop passing itself to optimizers' step."
