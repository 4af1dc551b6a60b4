"""One thread at a time in a monitor, and what a thread keeps of the call of the model that it makes.

Invariants: in a process that is forked off, no thread is in one.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar

__all__ = ["Here", "Turn", "alone"]

P = ParamSpec("P")
R = TypeVar("R")

_turns: Final[weakref.WeakSet[Turn]] = weakref.WeakSet()


class Turn:
    """Whose turn it is.

    Attributes:
        lock: taken as ``with turn.lock:``, by its holder again, as hooks may call what has hooks.
    """

    def __init__(self) -> None:
        self.forget()
        _turns.add(self)

    def forget(self) -> None:
        """Whoever has it is not in this process."""
        self.lock = threading.RLock()


class Taking(Protocol):
    """What one thread at a time is in."""

    turn: Turn


T = TypeVar("T", bound=Taking)


def alone(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """Has a method wait for its turn."""

    @functools.wraps(method)
    def waits(self: T, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.turn.lock:
            return method(self, *args, **kwargs)

    return waits


class Here(threading.local):
    """What this thread keeps."""

    whole: Any = None
    """The step of the call of the whole model that it makes."""


def _in_child() -> None:
    for turn in _turns:
        turn.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
