"""Optimizers: how to recognise and run a step, and whether it handles a scaler itself.

Invariants:

- nothing here changes an optimizer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType
from typing import Any, Final

import torch

__all__ = ["handles_scaling", "is_optimizer_step", "old_contract_warning", "step_without_hooks"]

_OPTIMIZER: Final = sys.modules["torch.optim.optimizer"].__file__


def is_optimizer_step(code: CodeType) -> bool:
    """Return True for the code object of the function that wraps every optimizer's `step` (2.13)."""
    return code.co_name == "wrapper" and code.co_filename == _OPTIMIZER


def step_without_hooks(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """Return the optimizer's own step without its hooks, to be called for some of its parameters.

    The wrapped function has no public name; the wrapper adds only hooks and a mark for the profiler (2.13).
    """
    step = type(optimizer).step
    inside = getattr(step, "__wrapped__", step)
    return lambda: inside(optimizer)


def handles_scaling(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the optimizer's `step`, as that of all fused ones, unscales and skips by itself (2.13)."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def old_contract_warning() -> str:
    """Return PyTorch's warning about an optimizer whose step takes the scaler, from the code's constants (2.13)."""
    texts = torch.amp.GradScaler.step.__code__.co_consts
    prefix = "GradScaler is going to stop"
    warnings = (t for t in texts if isinstance(t, str) and t.startswith(prefix))
    return next(warnings, f"{prefix} passing itself to optimizers' step.")
