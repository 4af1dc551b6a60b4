"""Locks that are free in a forked process.

Only the thread that called `fork` exists in the child. A lock that another thread held would stay locked there, and the
data that it protects could be half written. A `ForkSafeLock` is free in the child. With `make_fork_safe`, the data is
complete too.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Concatenate, Final, ParamSpec, Protocol, TypeVar

__all__ = ["ForkSafeLock", "make_fork_safe", "synchronized"]

P = ParamSpec("P")
R = TypeVar("R")

_fork_safe: Final[weakref.WeakSet[ForkSafeLock]] = weakref.WeakSet()


class _Lock(Protocol):
    def acquire(self) -> bool: ...

    def release(self) -> None: ...


LockType = TypeVar("LockType", bound=_Lock)


def make_fork_safe(lock: LockType) -> LockType:
    """Make `fork` wait until no other thread holds the lock, and return the lock.

    `fork` acquires these locks in the reverse order of their creation. So where a thread holds lock A while it acquires
    lock B, lock A has to be created after lock B; the other order could deadlock.
    """
    if hasattr(os, "register_at_fork"):  # Windows does not fork
        os.register_at_fork(
            before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release
        )
    return lock


class ForkSafeLock:
    """A lock for the methods of one object, which is replaced by a new one in a forked process.

    Attributes:
        lock: Used as ``with mutex.lock:``. It is reentrant, because a hook may call code that runs another hook.
    """

    def __init__(self) -> None:
        self.reset()
        _fork_safe.add(self)

    def reset(self) -> None:
        """Replace the lock: the thread that holds it may not exist in this process."""
        self.lock = threading.RLock()


class _HasLock(Protocol):
    mutex: ForkSafeLock


T = TypeVar("T", bound=_HasLock)


def synchronized(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """Make a method hold its object's `mutex` while it runs."""

    @functools.wraps(method)
    def locked_method(self: T, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.mutex.lock:
            return method(self, *args, **kwargs)

    return locked_method


def _reset_in_child() -> None:
    for mutex in _fork_safe:
        mutex.reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_in_child)
