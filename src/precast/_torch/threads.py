"""PyTorch's own threads, and the thread-local values that they inherit from the thread that uses them.

Invariants:

- a value lives until PyTorch releases it, and the process waits for that before it ends.
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

__all__ = ["in_pool_thread", "inherited_tls", "set_inherited_tls"]


def in_pool_thread() -> bool:
    """Return True if compiled code (PyTorch or another library) started this thread, not Python."""
    return isinstance(threading.current_thread(), threading._DummyThread)


def set_inherited_tls(key: str, value: object) -> None:
    """Pass `value` to the threads of PyTorch's own that work for this one: deep backward, `torch.jit.fork`.

    They inherit this thread's dispatch keys, autocast's included, but no thread-local values of Python (2.13).
    """
    if VERSION < (2, 12):
        # PyTorch stores the value without incrementing its reference count, and decrements it later.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    if (thread := threading.get_native_id()) not in _lenders:
        _add_lender(thread)
    torch._C._stash_obj_in_tls(key, value)


def inherited_tls(key: str) -> Any:
    """Return the value for `key` of the thread that this one works for, or None."""
    return torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else None


_lenders: Final[set[int]] = set()
"""Native ids of the threads whose values others inherit; ids of ended threads are removed occasionally."""


def _add_lender(thread: int) -> None:
    if len(_lenders) >= 1024:
        _lenders.difference_update([t for t in list(_lenders) if not _exists(t)])
    _lenders.add(thread)


def _exists(thread: int) -> bool:
    """Return True if the operating system still has a thread; on Linux only, elsewhere False."""
    return os.path.exists(f"/proc/self/task/{thread}")


@atexit.register
def _await_lenders() -> None:
    """Before Python ends, wait for threads that have ended in Python but not yet in the operating system.

    They release their values at their end, and take the GIL for that, which aborts the process once Python has ended
    (2.13).
    """
    alive = {thread.native_id for thread in threading.enumerate()}
    deadline = time.monotonic() + 5.0
    for thread in _lenders - alive:
        while _exists(thread) and time.monotonic() < deadline:
            time.sleep(0.001)
