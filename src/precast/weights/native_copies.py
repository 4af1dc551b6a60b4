"""The copies that compiled kernels use, as Python asks for them: C++ keeps one table of them for each thread.

Invariants:

- the engine says what is here when it loads its library; without one, the weight cache keeps all copies itself;
- Python and the compiled kernels use one table, so one region never casts a weight twice;
- what is dropped is dropped in that table too, also while regions run on the reference.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from precast.weights.held_record import HeldRecord

__all__ = ["Evicted", "NativeCopies", "NativeHeld", "Use", "native"]


class Use(enum.IntEnum):
    """In which circumstances a copy is used; the numbers are those of `engine/native/copy_table.h`."""

    LEAF = 0
    """It carries a gradient, and lasts as long as the outermost region."""
    PER_REGION = 1
    """A held copy of a frozen weight where gradients are recorded; it lasts as long as the outermost region."""
    PERSISTENT = 2
    """A held copy where no gradient is recorded; it outlives regions."""


class Evicted(enum.IntEnum):
    """Which entries of a held copy are dropped; the numbers are those of `engine/native/copies.h`."""

    ALL = 0
    PERSISTENT = 1
    PERSISTENT_AND_OLDER = 2
    """Those that outlive regions, and those of another version of the parameter."""


class NativeHeld(Protocol):
    """One held copy as compiled kernels know it, and their memory for its parameter's gradient."""

    record: HeldRecord

    def cast_of(self, parameter: Tensor, copy: Tensor) -> Tensor:
        """The copy as a cast of the parameter, which gives it its gradient."""

    def lend(self, parameter: Tensor, copy: Tensor) -> None:
        """Lets this thread's kernels use the copy and renew it, from now on."""

    def step(self) -> bool:
        """Takes a lent copy out of all caches, and has it renewed at its next use; False where it is not lent."""

    def take_back(self) -> bool:
        """Ends that; False where kernels are using it at this moment."""

    def is_shared(self, copy: Tensor) -> bool:
        """Whether another tensor uses the memory of the copy."""


class NativeCopies(Protocol):
    """The table of this thread's copies, as the library offers it."""

    def copy_of(self, source: Tensor, dtype: torch.dtype) -> Tensor:
        """The copy of a leaf for this region, which is made if need be."""

    def find(self, source: Tensor, dtype: torch.dtype) -> Tensor | None:
        """The copy of a leaf for this region, if there is one that stands for it."""

    def invalidate(self, sources: Iterable[Tensor], dtype: torch.dtype | None) -> None:
        """Makes the copies of these leaves, in one dtype or in all, out of date, whatever version counters say."""

    def keep(
        self, source: Tensor, cast: Tensor, *, use: Use, held: int, version: int, pointer: int
    ) -> None:
        """Keeps what stands for the held copy of this number, as its source was when it was copied."""

    def evict(
        self, source: int, dtype: torch.dtype, held: int, which: Evicted, version: int
    ) -> None:
        """Drops what stands for the held copy of this number, in all threads."""

    def hold(self, source: int, is_held: bool) -> None:
        """Says whether a parameter, given by the address of its TensorImpl, is held."""

    def new_held(self, number: int) -> NativeHeld:
        """What kernels are to know of the held copy of this number; it ends with the object."""

    def leave_to_regions(self, source: int, is_left: bool) -> None:
        """Says whether each region casts a held parameter as if it were not held, where its gradient is recorded."""

    def free_temporaries(self) -> None:
        """Gives back the memory that gradients of several parameters take in turns."""

    def free_spare_memory(self) -> None:
        """Gives back the memory that waits for the copies of the next region, in all threads."""

    def count(self) -> int:
        """How many copies this thread has, those that outlive regions too."""

    def clear(self) -> None:
        """Drops what does not outlive a region."""


class _Native:
    """The library's table, and whether regions that are entered now use it."""

    __slots__ = ("copies", "is_used")

    def __init__(self) -> None:
        self.copies: NativeCopies | None = None
        self.is_used = False


native = _Native()
"""One for the process: set by `engine.native` when it is loaded."""
