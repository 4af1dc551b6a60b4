"""One entry of the weight cache: a copy, and what its source looked like when it was made.

Invariants:

- it is made, or told a version, before the copy is: what another thread writes meanwhile is then seen at the next use;
- an entry outlives its copy, as what never changes about a weight is found out once;
- sources are held weakly.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from precast._torch import is_plain, version_of

__all__ = ["CachedCast"]


class CachedCast:
    """One lower-precision copy, and what its source looked like when it was made; between regions, without the copy."""

    __slots__ = (
        "__weakref__",
        "cast",
        "other",
        "owner",
        "pointer",
        "requires_grad",
        "shape",
        "storage",
        "stride",
        "version",
    )

    def __init__(
        self, source: Tensor, cast: Tensor | None, owner: Tensor, forget: Callable[[Any], Any]
    ) -> None:
        self.cast = cast
        self.other: CachedCast | None = None
        """The one from before its source was frozen, or thawed, in this region."""
        self.version = version_of(source)
        self.requires_grad = source.requires_grad
        self.owner = weakref.ref(owner, forget)
        # An address is given out again when its storage is freed: no copy may live longer than that.
        plain = is_plain(type(source))
        self.pointer = source.data_ptr() if plain else 0
        self.shape, self.stride = source.shape, source.stride()
        self.storage = weakref.ref(source.untyped_storage(), forget) if plain else None

    def is_of(self, source: Tensor) -> bool:
        """Whether `source` is still what was cast."""
        return self.requires_grad == source.requires_grad and self.has_numbers_of(source)

    def has_numbers_of(self, source: Tensor) -> bool:
        """Whether the contents of `source` are still what was cast."""
        return self.version == version_of(source) and (
            self.storage is None or self.is_where(source)
        )

    def is_where(self, source: Tensor) -> bool:
        """Whether `source` lies in the memory that it was in, and as it lay there."""
        return (
            self.pointer == source.data_ptr()
            and self.shape == source.shape
            and self.stride == source.stride()
        )

    def withdraw(self) -> None:
        """Ends what stands for a held copy, in whichever thread's cache it is."""
        self.version = -1  # first: see `hotpath`
        self.cast = None

    def renew(self, cast: Tensor, version: int) -> None:
        """Takes a copy of the same source, which was written or has lost its copy: as it was in that version."""
        self.cast = cast
        self.other = None
        self.version = version
