"""Locks that a forked process finds free, and what they guard whole.

A child has only the thread that forked: what another thread had locked would stay locked, and half written.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Concatenate, Final, ParamSpec, Protocol, TypeVar

__all__ = ["ForkSafeLock", "survives_fork", "synchronized"]

P = ParamSpec("P")
R = TypeVar("R")

_fork_safe: Final[weakref.WeakSet[ForkSafeLock]] = weakref.WeakSet()


class _Lock(Protocol):
    def acquire(self) -> bool: ...

    def release(self) -> None: ...


LockType = TypeVar("LockType", bound=_Lock)


def survives_fork(lock: LockType) -> LockType:
    """Has a process fork only while nobody else has the lock.

    Forking takes such locks in the reverse order of their making, so a lock that is held while another is asked for
    is to be made after that one.
    """
    if hasattr(os, "register_at_fork"):  # Windows does not fork
        os.register_at_fork(
            before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release
        )
    return lock


class ForkSafeLock:
    """A lock for the methods of one object. A forked process finds it free, whoever held it.

    Attributes:
        lock: taken as ``with mutex.lock:``, by its holder again, as hooks may call what has hooks.
    """

    def __init__(self) -> None:
        self.reset()
        _fork_safe.add(self)

    def reset(self) -> None:
        """Frees it: the thread that holds it is not in this process."""
        self.lock = threading.RLock()


class _HasLock(Protocol):
    mutex: ForkSafeLock


T = TypeVar("T", bound=_HasLock)


def synchronized(
    method: Callable[Concatenate[T, P], R],
) -> Callable[Concatenate[T, P], R]:
    """Makes a method hold its object's `mutex` while it runs."""

    @functools.wraps(method)
    def holding(self: T, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.mutex.lock:
            return method(self, *args, **kwargs)

    return holding


def _reset_in_child() -> None:
    for mutex in _fork_safe:
        mutex.reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_in_child)
