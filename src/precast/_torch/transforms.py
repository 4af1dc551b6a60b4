"""Transformations of a program: TorchScript, `torch.func`, forward-mode differentiation.

Invariants:

- each function is about the calling thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = [
    "in_forward_mode",
    "innermost_transform",
    "is_functorch_active",
    "is_functorch_wrapper",
    "is_real",
    "is_tracing",
    "optimize_torchscript",
    "optimizes_torchscript",
]

is_tracing: Callable[[], bool] = torch._C._is_tracing
"""The function that `torch.jit.is_tracing` calls; used directly, as regions call it for each operation (2.13)."""


def optimizes_torchscript() -> bool:
    """Return True if scripted functions that start in this thread are optimised (2.13).

    The optimiser writes PyTorch's casts into a graph, whatever the policy, and differentiates graphs without regard to
    casts that are made below. Without it, a scripted function runs operation by operation, as in Python.
    """
    optimizes: bool = torch._C._get_graph_executor_optimize()
    return optimizes


def optimize_torchscript(optimize: bool) -> None:
    """Enable or disable TorchScript's optimiser in this thread; the getter is also the setter (2.13)."""
    torch._C._get_graph_executor_optimize(optimize)


innermost_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
"""Return the `torch.func` transform (vmap, grad ...) that is running in this thread; None without one (2.13)."""


def is_functorch_active() -> bool:
    """Return True if a `torch.func` transform (vmap, grad ...) is running in this thread."""
    return innermost_transform() is not None


def is_functorch_wrapper(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is a wrapper made by a `torch.func` transform or by `is_grads_batched` (2.13)."""
    functorch = torch._C._functorch
    is_wrapper: bool = functorch.is_functorch_wrapped_tensor(tensor)
    return is_wrapper or functorch.is_legacy_batchedtensor(tensor)


def in_forward_mode() -> bool:
    """Return True if a `torch.autograd.forward_ad.dual_level` is open, so that tensors may have tangents (2.13)."""
    return torch.autograd.forward_ad._current_level >= 0


def is_real() -> bool:
    """Return True if this thread runs eagerly: no trace records it and no `torch.func` transform is running."""
    return not is_tracing() and not is_functorch_active()
