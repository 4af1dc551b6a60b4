"""One entry of the weight cache: a copy, and what its source was like when the copy was made.

Invariants:

- the version is noted before the copy is made: what another thread writes meanwhile is then seen at the next use;
- nothing in an entry refers to a tensor weakly, unless the entry stands for a held copy: see `weight_cache`.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from precast._torch import counts_versions, version_of
from precast.weights.freshness import is_at, is_fresh

__all__ = ["CachedCast"]


class CachedCast:
    """One lower-precision copy, and what its source looked like when it was made.

    Args:
        source: what is cast.
        plain: whether its numbers are in memory that it has an address of.
        counted: whether writes to it are counted.
    """

    __slots__ = (
        "__weakref__",
        "cast",
        "owner",
        "plain",
        "pointer",
        "shape",
        "storage",
        "stride",
        "version",
    )

    def __init__(self, source: Tensor, *, plain: bool = True, counted: bool = True) -> None:
        self.cast: Tensor | None = None
        self.plain = plain
        self.version = version_of(source) if counted else 0
        self.pointer = source.data_ptr() if plain else 0
        self.shape, self.stride = source.shape, source.stride()
        # What ends with a held parameter, and with its memory: see `WeightCache._entry`.
        self.owner: weakref.ref[Tensor] | None = None
        self.storage: weakref.ref[Any] | None = None

    def is_fresh_for(self, source: Tensor) -> bool:
        """Whether `source` is still what was cast, as far as its counter of versions says; never where it has none."""
        if self.cast is None or not counts_versions(source):
            return False
        return is_fresh(self, source) if self.plain else self.version == version_of(source)

    def has_numbers_of(self, source: Tensor) -> bool:
        """Whether the cast has the numbers of `source`: for one that counts no writes, as in inference mode."""
        if self.cast is None or not self.plain or not is_at(self, source):
            return False
        with torch.no_grad():
            return torch.equal(self.cast, source.to(self.cast.dtype))

    def evict(self, _: object = None) -> None:
        """Drops the copy, in whichever thread's cache the entry is, because it is out of date."""
        self.version = -1  # first: see `engine.generated`
        self.cast = None

    def renew(self, cast: Tensor, version: int) -> None:
        """Takes a copy of the same source, which was written or has lost its copy: as it was in that version."""
        self.cast = cast
        self.version = version
