"""What Python and compiled kernels both know of a held copy: numbers in memory that both read and write.

Invariants:

- the fields are those of `HeldRecord` in `engine/native/held.h`, in the same order;
- Python's copies have such a record also where there is no library, so that there is one way to read it;
- Python takes a copy back before it changes its record, and kernels change only that of a copy that is lent to them.
"""

from __future__ import annotations

import ctypes
import enum
from typing import NamedTuple

__all__ = ["Circumstances", "HeldRecord", "Owner"]


class Circumstances(NamedTuple):
    """What can be known at one moment of those who write a parameter, and all that lie in its memory."""

    trains: bool
    """Whether it is used where its gradient is recorded."""
    is_trainable: bool
    received: int
    """How many gradients have come through held casts."""
    has_gradient: bool
    versions: tuple[int, ...]
    """The version counters of the others in its memory."""


class Owner(enum.IntEnum):
    """Who may use and renew a copy; the numbers are those of `engine/native/held.h`."""

    PYTHON = 0
    LENT = 1
    """The kernels of one thread."""
    IN_USE = 2
    """The kernels of one thread, at this moment."""


class HeldRecord(ctypes.Structure):
    """The numbers of one copy."""

    _fields_ = (
        ("version", ctypes.c_int64),
        ("pointer", ctypes.c_int64),
        ("writes", ctypes.c_int64),
        ("received", ctypes.c_int64),
        ("received_then", ctypes.c_int64),
        ("had_gradient", ctypes.c_int64),
        ("is_kernels", ctypes.c_int64),
        ("thread", ctypes.c_uint64),
        ("owner", ctypes.c_int32),
    )

    version: int
    """The parameter's version counter when it was copied; -1 for a copy that has to be renewed."""
    pointer: int
    """The parameter's address when it was copied."""
    writes: int
    """How often the copy was written."""
    received: int
    """How many gradients have come through casts of it."""
    received_then: int
    """How many had come when it was written."""
    had_gradient: int
    """Whether the parameter had a gradient then."""
    is_kernels: int
    """Whether kernels wrote it last."""
    thread: int
    """The thread to whose kernels it is lent, by its `ident`."""
    owner: int
    """One of `Owner`."""

    def __init__(self) -> None:
        super().__init__(version=-1, pointer=-1)
