"""PyTorch's own threads, and the thread-local values that they inherit from the thread they work for.

Invariants:

- a value stays alive until PyTorch releases it, and the process waits for that before it ends.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
from typing import Any, Final

import torch

from precast._torch.version import VERSION

__all__ = [
    "in_pool_thread",
    "inherited_tls",
    "set_inherited_tls",
]


def in_pool_thread() -> bool:
    """Whether this thread was not started by Python, but by PyTorch or another library of compiled code."""
    return isinstance(threading.current_thread(), threading._DummyThread)


def set_inherited_tls(key: str, value: object) -> None:
    """Gives `value` to the threads of PyTorch's own that work for this one: deep backward, `torch.jit.fork`.

    Such threads inherit this thread's dispatch keys, autocast's too, but none of Python's thread-local values (2.13).
    """
    if VERSION < (2, 12):
        # PyTorch keeps the value without counting its reference, and releases that reference later.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    if (thread := threading.get_native_id()) not in _lenders:
        _note_lender(thread)
    torch._C._stash_obj_in_tls(key, value)


def inherited_tls(key: str) -> Any:
    """The value under `key` of the thread that this one works for, or None."""
    return torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else None


_lenders: Final[set[int]] = set()
"""The threads whose values others inherit, by the system's numbers; those that have ended are removed now and then."""


def _note_lender(thread: int) -> None:
    if len(_lenders) >= 1024:
        _lenders.difference_update([t for t in list(_lenders) if not _runs(t)])
    _lenders.add(thread)


def _runs(thread: int) -> bool:
    """Whether the system still has a thread, as Linux says it; elsewhere False."""
    return os.path.exists(f"/proc/self/task/{thread}")


@atexit.register
def _await_lenders() -> None:
    """Waits, before Python ends, for threads that have ended for Python and not yet for the system.

    They release their values when they end for the system. For that they take the interpreter's lock, which would abort
    a process in which Python has ended already (2.13).
    """
    alive = {thread.native_id for thread in threading.enumerate()}
    until = time.monotonic() + 5.0
    for thread in _lenders - alive:
        while _runs(thread) and time.monotonic() < until:
            time.sleep(0.001)
