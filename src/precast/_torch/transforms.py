"""What makes another program of one that runs: TorchScript, `torch.func`, forward-mode differentiation.

Invariants:

- each answer is about the thread that asks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = [
    "in_forward_mode",
    "is_functorch_active",
    "is_functorch_wrapper",
    "is_real",
    "is_tracing",
    "optimize_torchscript",
    "optimizes_torchscript",
]

# What `torch.jit.is_tracing` asks, without a call in Python around it: the hot path asks for each operation (2.13).
is_tracing: Callable[[], bool] = torch._C._is_tracing


# TorchScript's optimiser runs an autocast pass of its own, which writes PyTorch's casts into the graph whatever the
# policy, and differentiates graphs without looking at casts made below. Both are off in a thread that has switched
# the optimiser off; a scripted function then runs operation by operation, like Python (2.13).
def optimizes_torchscript() -> bool:
    """Whether scripted functions that start in this thread are optimised."""
    optimizes: bool = torch._C._get_graph_executor_optimize()
    return optimizes


def optimize_torchscript(optimize: bool) -> None:
    """Switches TorchScript's optimiser in this thread; the getter is the setter."""
    torch._C._get_graph_executor_optimize(optimize)


def is_functorch_active() -> bool:
    """Whether a `torch.func` transform (vmap, grad ...) is running in this thread."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_functorch_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one that a `torch.func` transform, or `is_grads_batched`, made to stand for others (2.13)."""
    functorch = torch._C._functorch
    wraps: bool = functorch.is_functorch_wrapped_tensor(tensor)
    return wraps or functorch.is_legacy_batchedtensor(tensor)


def in_forward_mode() -> bool:
    """Whether a `torch.autograd.forward_ad.dual_level` is open: any tensor may have a tangent (2.13)."""
    return torch.autograd.forward_ad._current_level >= 0


def is_real() -> bool:
    """Whether what runs in this thread gives numbers: nothing is traced, no `torch.func` transform is running."""
    return not is_tracing() and not is_functorch_active()
