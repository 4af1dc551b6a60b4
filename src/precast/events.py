"""What the engine and the scaler tell observers: small frozen values, handed to callbacks.

Invariants:
- without an observer nothing is built, stored or computed: `emit` loops over an empty tuple, and
  code whose event costs something to make asks `observed()` first;
- observers belong to the thread that entered `observe`; events arrive in order, before the call
  that caused them returns; an observer's exception is that call's exception;
- this file imports nothing of torch at run time, so that reports on events need not either.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Note", "StepEvent", "emit", "observe", "observed"]


@dataclass(frozen=True, slots=True)
class Note:
    """The engine did something worth knowing, such as running a banned loss in float32."""

    op: str
    """The operation, as the policy spells it."""
    device: str
    """The device type of the region."""
    message: str
    """What was done instead, and why."""


@dataclass(frozen=True, slots=True, eq=False)
class StepEvent:
    """A gradient scaler's `step` on one optimizer has ended.

    Making it waits for no device; reading `scale`, and `skipped` where it is a tensor, does.
    """

    optimizer: int
    """Which optimizer: its place in the order of this iteration's first calls, from 0."""
    step: int
    """How many iterations (calls of `update`) this scaler had completed before."""
    scale: Tensor
    """The scale of the gradients, float32, shape (), a copy: ``float(event.scale)``."""
    skipped: bool | Tensor
    """Whether a gradient was not finite, so that the parameters were left alone.

    A tensor (float32, shape ()) with a fused optimizer, which decides on the device;
    ``bool(event.skipped)`` reads either.
    """


class _Here(threading.local):
    callbacks: tuple[Callable[[Any], None], ...] = ()


_here = _Here()


@contextmanager
def observe(callback: Callable[[Any], None]) -> Iterator[None]:
    """Calls `callback(event)` for every event of this thread until the `with` ends.

    Observers nest: each gets every event, the outermost first.

    >>> seen = []
    >>> with observe(seen.append):
    ...     emit(Note("mse_loss", "cpu", "ran in float32"))
    >>> seen[0].op
    'mse_loss'
    """
    _here.callbacks = (*_here.callbacks, callback)
    try:
        yield
    finally:
        _here.callbacks = _without_last(_here.callbacks, callback)


def observed() -> bool:
    """Whether this thread has an observer: ask before making an event that costs something."""
    return bool(_here.callbacks)


def emit(event: object) -> None:
    """Hands `event` to this thread's observers."""
    for callback in _here.callbacks:
        callback(event)


def _without_last(callbacks: tuple[Any, ...], callback: Any) -> tuple[Any, ...]:
    """Takes out one entry, so that observers that end out of order do not end each other."""
    place = max(i for i, known in enumerate(callbacks) if known is callback)
    return callbacks[:place] + callbacks[place + 1 :]
