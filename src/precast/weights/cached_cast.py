"""One entry of the weight cache: a copy, and what its source was like when the copy was made.

Invariant: the version is noted before the copy is made, so the next use sees what another thread writes meanwhile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from precast._torch import counts_versions, version_of
from precast.weights.freshness import is_at, is_fresh
from precast.weights.held_copy import CopyHandle

__all__ = ["CachedCast"]


class CachedCast:
    """One lower-precision copy, and what its source looked like when it was made.

    Args:
        source: what is cast.
        plain: whether its numbers are in memory that it has an address of.
        handle: the held copy that this one stands for, if it does.
    """

    __slots__ = ("__weakref__", "cast", "handle", "plain", "pointer", "shape", "stride", "version")

    def __init__(
        self, source: Tensor, *, plain: bool = True, handle: CopyHandle | None = None
    ) -> None:
        self.cast: Tensor | None = None
        self.plain = plain
        self.handle = handle
        self.version = version_of(source) if counts_versions(source) else 0
        self.pointer = source.data_ptr() if plain else 0
        self.shape, self.stride = source.shape, source.stride()
        if handle is not None:  # the copy was made earlier
            self.version, self.pointer = handle.version, handle.pointer

    def stands_for(self, source: Tensor) -> bool:
        """Whether the cast may be used for `source` as it is now.

        A tensor that was made in inference mode counts no versions: there, the numbers are compared.
        """
        if self.cast is None or (self.handle is not None and not self.handle.is_current()):
            return False
        if not counts_versions(source):
            return self._has_numbers_of(source, self.cast)
        return is_fresh(self, source) if self.plain else self.version == version_of(source)

    def _has_numbers_of(self, source: Tensor, cast: Tensor) -> bool:
        if not self.plain or not is_at(self, source):
            return False
        with torch.no_grad():
            return torch.equal(cast, source.to(cast.dtype))

    def evict(self, _: object = None) -> None:
        """Drops the copy, because it is out of date."""
        self.cast = None
