"""Structures and enumerations that Python and C++ share.

Invariants:

- the fields of `HeldRecord` are those in `native/held.h`, in the same order, and the values of the enumerations are
  those in the C++ headers;
- a held copy has a record even without the C++ library, so that its fields are read in one place;
- Python takes a copy back before it changes the record; kernels change only the records of copies lent to them.
"""

from __future__ import annotations

import ctypes
import enum

__all__ = ["CopyLifetime", "Eviction", "HeldRecord", "Owner"]


class CopyLifetime(enum.IntEnum):
    """The lifetime of a copy in the table of a thread. The values are those of `native/copy_table.h`."""

    LEAF = 0
    """A copy with a gradient, until the outermost region ends."""
    PER_REGION = 1
    """A held copy of a frozen weight while gradients are recorded, until the outermost region ends."""
    PERSISTENT = 2
    """A held copy while no gradients are recorded. It outlives regions."""


class Eviction(enum.IntEnum):
    """Selects the entries of a held copy that an eviction removes. The values are those of `native/copies.h`."""

    ALL = 0
    PERSISTENT = 1
    PERSISTENT_AND_OLDER = 2
    """The persistent ones, and those of other versions of the parameter."""


class Owner(enum.IntEnum):
    """The owner of a copy, who may use and rewrite it. The values are those of `native/held.h`."""

    PYTHON = 0
    LENT = 1
    """The kernels of one thread."""
    IN_USE = 2
    """The kernels of one thread, during a use."""


class HeldRecord(ctypes.Structure):
    """The shared fields of one copy."""

    _fields_ = (
        ("version", ctypes.c_int64),
        ("pointer", ctypes.c_int64),
        ("writes", ctypes.c_int64),
        ("received", ctypes.c_int64),
        ("received_at_write", ctypes.c_int64),
        ("had_gradient_at_write", ctypes.c_int64),
        ("written_by_kernels", ctypes.c_int64),
        ("thread", ctypes.c_uint64),
        ("owner", ctypes.c_int32),
    )

    version: int
    """The parameter's version counter at the last write; -1 for a copy that must be rewritten."""
    pointer: int
    """The parameter's data pointer at the last write."""
    writes: int
    """The number of writes."""
    received: int
    """The number of gradients that were computed through casts of the copy."""
    received_at_write: int
    """`received` at the last write."""
    had_gradient_at_write: int
    """1 if the parameter had a gradient at the last write."""
    written_by_kernels: int
    """1 if kernels made the last write."""
    thread: int
    """The `ident` of the thread whose kernels the copy is lent to."""
    owner: int
    """A value of `Owner`."""

    def __init__(self) -> None:
        super().__init__(version=-1, pointer=-1)
