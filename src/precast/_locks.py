"""Locks that a forked process finds free, and what they guard whole.

A child has only the thread that forked: what another thread had locked would stay locked, and half written.
"""

from __future__ import annotations

import os
from typing import Protocol, TypeVar

__all__ = ["survives_fork"]


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
