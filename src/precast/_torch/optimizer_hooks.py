"""precast's hooks on the steps of all optimizers, registered once.

Invariants:

- PyTorch has two hooks of precast's while there are listeners, and none otherwise;
- listeners are called in the order of their registration;
- a listener may be added or removed during a step; that takes effect with the next call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from precast._internal.locks import survives_fork

__all__ = ["on_optimizer_step", "run_next_to_step"]


@dataclass(frozen=True, eq=False, slots=True)
class _StepListener:
    """Two functions that are called around each step. Compared by identity, as one function may be registered twice."""

    before: Callable[[Optimizer], Any] | None
    after: Callable[[Optimizer], Any] | None


_lock: Final = survives_fork(threading.RLock())
_handles: Final[list[Any]] = []
_listeners: tuple[_StepListener, ...] = ()


def on_optimizer_step(
    *,
    before: Callable[[Optimizer], Any] | None = None,
    after: Callable[[Optimizer], Any] | None = None,
) -> Callable[[], None]:
    """Call `before` and `after` around each step of each optimizer; return a function that ends that.

    Args:
        before: called with the optimizer, before it reads the gradients.
        after: called with the optimizer, after it has written its parameters.
    """
    listener = _StepListener(before, after)
    with _lock:
        _set_listeners(*_listeners, listener)

    def end() -> None:
        with _lock:
            _set_listeners(*(each for each in _listeners if each is not listener))

    return end


def run_next_to_step(optimizer: Optimizer, before: Any, after: Any) -> None:
    """Move two hooks of an optimizer so that no other hook runs between them and the step.

    Hooks run in the order of a dict, whose iteration starts after the global hooks have run (2.13).

    Args:
        optimizer: the optimizer, in a call from a listener of `on_optimizer_step`.
        before: the handle of the hook to call last before the step.
        after: the handle of the hook to call first after it.
    """
    hooks_before: Any = optimizer._optimizer_step_pre_hooks
    hooks_before.move_to_end(before.id)
    hooks_after: Any = optimizer._optimizer_step_post_hooks
    hooks_after.move_to_end(after.id, last=False)


def _set_listeners(*listeners: _StepListener) -> None:
    global _listeners  # noqa: PLW0603 -- a tuple, so that a running step keeps the listeners it started with
    _listeners = listeners
    if listeners and not _handles:
        _handles.append(register_optimizer_step_pre_hook(_call_before))
        _handles.append(register_optimizer_step_post_hook(_call_after))
    while _handles and not listeners:
        _handles.pop().remove()


def _call_before(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    for listener in _listeners:
        if listener.before:
            listener.before(optimizer)


def _call_after(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    for listener in _listeners:
        if listener.after:
            listener.after(optimizer)
