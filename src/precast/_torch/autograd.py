"""Autograd: the nodes of a graph, the backward pass that runs, hooks on gradients.

Invariants:

- nothing here begins or ends a backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

__all__ = [
    "BACKWARD",
    "current_node",
    "hook_gradient",
    "in_backward",
    "next_sequence",
    "outside_inference_mode",
    "sequence_of",
]

# The node of the graph whose backward runs in this thread, or None; how many nodes this thread has made. A node's own
# number, by which its backward is known, is what was next when it was made: just before its operation ran (2.13).
current_node: Callable[[], Any] = torch._C._current_autograd_node

next_sequence: Callable[[], int] = torch._C._autograd._get_sequence_nr


def sequence_of(node: Any) -> int:
    """A node's number."""
    number: int = node._sequence_nr()
    return number


BACKWARD: Final = torch.autograd.graph._engine_run_backward.__code__


def in_backward() -> bool:
    """Whether this thread runs a backward pass, as what a checkpoint runs again does; it asks the same (2.13)."""
    return torch._C._current_graph_task_id() != -1


def hook_gradient(tensor: torch.Tensor, hook: Callable[[torch.Tensor | None], None]) -> None:
    """Has `hook` called with the gradient of a tensor that is no leaf; it stays on the graph, not on the tensor.

    As `Tensor.register_hook`, at a third of its cost: that makes a dictionary for the tensor and a handle for the hook
    in Python (2.13). The tensor's own hooks, where it has some, are left as they are.
    """
    own = tensor._backward_hooks
    if own is not None:
        tensor.register_hook(hook)
        return
    tensor._backward_hooks = {0: hook}
    tensor.grad_fn._register_hook_dict(tensor)  # type: ignore[union-attr]
    tensor._backward_hooks = None


def outside_inference_mode() -> Any:
    """A context in which gradients are recorded, whatever mode is around it.

    `torch.inference_mode(False)` and `torch.enable_grad()` in one, and without their Python: 0.5 us for 3 (2.13).
    """
    return torch._C._InferenceMode(False)
