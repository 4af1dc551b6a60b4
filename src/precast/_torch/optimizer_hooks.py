"""The one registration of precast's hooks on the steps of all optimizers.

Invariants:

- PyTorch holds two hooks of precast's while somebody listens, and none otherwise;
- listeners are called in the order in which they began to listen;
- a listener may begin or end while a step's listeners are called: from the next call on, that has its effect.
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

__all__ = ["on_optimizer_step"]


@dataclass(frozen=True, eq=False, slots=True)
class _Listener:
    """Two functions that are called around each step; equal to no other, as one function may listen twice."""

    before: Callable[[Optimizer], Any] | None
    after: Callable[[Optimizer], Any] | None


_lock: Final = survives_fork(threading.RLock())
_handles: Final[list[Any]] = []
_listeners: tuple[_Listener, ...] = ()


def on_optimizer_step(
    *,
    before: Callable[[Optimizer], Any] | None = None,
    after: Callable[[Optimizer], Any] | None = None,
) -> Callable[[], None]:
    """Calls `before` and `after` around each step of each optimizer; what ends that is returned.

    Args:
        before: called with the optimizer, whose gradients are there.
        after: called with the optimizer, which has written its parameters.
    """
    mine = _Listener(before, after)
    with _lock:
        _tell(*_listeners, mine)

    def end() -> None:
        with _lock:
            _tell(*(each for each in _listeners if each is not mine))

    return end


def _tell(*listeners: _Listener) -> None:
    global _listeners  # noqa: PLW0603 -- a tuple, so that a step goes on with those with whom it began
    _listeners = listeners
    if listeners and not _handles:
        _handles.append(register_optimizer_step_pre_hook(_begins))
        _handles.append(register_optimizer_step_post_hook(_ends))
    while _handles and not listeners:
        _handles.pop().remove()


def _begins(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    for listener in _listeners:
        if listener.before:
            listener.before(optimizer)


def _ends(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    for listener in _listeners:
        if listener.after:
            listener.after(optimizer)
