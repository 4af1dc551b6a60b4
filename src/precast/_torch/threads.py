"""PyTorch's own threads, and the thread-local values that they inherit from the thread they work for.

Invariants:

- what a thread has given stays alive until PyTorch gives it back, and the process waits for that before it ends.
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
    """Whether the thread that asks was not started by Python, but by PyTorch (or another library of compiled code)."""
    return isinstance(threading.current_thread(), threading._DummyThread)


def set_inherited_tls(key: str, value: object) -> None:
    """Gives `value` to the threads of PyTorch's own that work for this one: deep backward, `torch.jit.fork`.

    They inherit this thread's dispatch keys, autocast's too, and nothing that Python knows as thread-local (2.13).
    """
    if VERSION < (2, 12):
        # PyTorch takes a reference that it has not counted, and gives it back one day.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    if (thread := threading.get_native_id()) not in _lenders:
        _note_lender(thread)
    torch._C._stash_obj_in_tls(key, value)


def inherited_tls(key: str) -> Any:
    """What the thread that this one works for has lent it under `key`, or None."""
    return torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else None


_lenders: Final[set[int]] = set()
"""The threads that have lent something, by the system's numbers; of those that are gone, not more than a few."""


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

    What they have lent is given back then, with the interpreter's lock, which aborts a process that is ending (2.13).
    """
    alive = {thread.native_id for thread in threading.enumerate()}
    until = time.monotonic() + 5.0
    for thread in _lenders - alive:
        while _runs(thread) and time.monotonic() < until:
            time.sleep(0.001)
