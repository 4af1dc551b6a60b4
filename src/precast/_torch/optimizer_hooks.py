"""The one registration of precast's hooks on the steps of all optimizers.

Invariants:

- PyTorch holds two hooks of precast's while somebody listens, and none otherwise;
- listeners are called in the order in which they began to listen;
- a listener may begin or end while a step's listeners are called: from the next call on, that has its effect.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from precast._internal.locks import survives_fork

__all__ = ["Listener", "on_optimizer_step"]

Listener = Callable[[Optimizer], Any]
_Listeners = tuple[tuple[object, Listener], ...]
"""Each with what tells it from others, as one function may listen twice."""

_lock: Final = survives_fork(threading.RLock())
_handles: Final[list[Any]] = []
_before: _Listeners = ()
_after: _Listeners = ()


def on_optimizer_step(
    *, before: Listener | None = None, after: Listener | None = None
) -> Callable[[], None]:
    """Calls `before` and `after` around each step of each optimizer; what ends that is returned.

    Args:
        before: called with the optimizer, whose gradients are there.
        after: called with the optimizer, which has written its parameters.
    """
    mine = object()
    with _lock:
        _listen(
            (*_before, *((mine, each) for each in (before,) if each)),
            (*_after, *((mine, each) for each in (after,) if each)),
        )

    def end() -> None:
        with _lock:
            _listen(
                tuple(each for each in _before if each[0] is not mine),
                tuple(each for each in _after if each[0] is not mine),
            )

    return end


def _listen(before: _Listeners, after: _Listeners) -> None:
    global _before, _after
    _before, _after = before, after
    if not _handles and (before or after):
        _handles.append(register_optimizer_step_pre_hook(_begins))
        _handles.append(register_optimizer_step_post_hook(_ends))
    elif _handles and not (before or after):
        while _handles:
            _handles.pop().remove()


def _begins(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    for _, listener in _before:
        listener(optimizer)


def _ends(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    for _, listener in _after:
        listener(optimizer)
