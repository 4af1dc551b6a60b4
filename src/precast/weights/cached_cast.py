"""One entry of the weight cache: a low-precision copy with a snapshot of its source.

Invariant: the version is read before the copy is made. A concurrent write by another thread then makes the entry stale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from precast._torch import counts_versions, version_if_counted, version_of
from precast.weights.freshness import has_same_memory, is_valid
from precast.weights.held_copy import CopyHandle

__all__ = ["CachedCast"]


class CachedCast:
    """A low-precision copy with the version counter, data pointer, shape and strides of its source.

    Args:
        source: the tensor to cast.
        is_plain_tensor: True if the source stores its elements at a data pointer (no wrapper subclass).
        handle: the held copy from which the cast was made, if any.
    """

    __slots__ = (
        "__weakref__",
        "cast",
        "handle",
        "is_plain_tensor",
        "pointer",
        "shape",
        "stride",
        "version",
    )

    def __init__(
        self, source: Tensor, *, is_plain_tensor: bool = True, handle: CopyHandle | None = None
    ) -> None:
        self.cast: Tensor | None = None
        # A nested tensor has no shape, and no operation changes its layout in place.
        self.is_plain_tensor = is_plain_tensor = is_plain_tensor and not source.is_nested
        self.handle = handle
        self.version = version_if_counted(source) or 0
        self.pointer = source.data_ptr() if is_plain_tensor else 0
        self.shape = source.shape if is_plain_tensor else torch.Size()
        self.stride = source.stride() if is_plain_tensor else ()
        if handle is not None:  # the copy was made earlier
            self.version, self.pointer = handle.version, handle.pointer

    def is_valid_for(self, source: Tensor) -> bool:
        """Return True if the cast equals a cast of `source` in its present state.

        A tensor made in inference mode has no version counter. Its values are compared instead.
        """
        if self.cast is None or (self.handle is not None and not self.handle.is_current()):
            return False
        if not counts_versions(source):
            return self._has_values_of(source, self.cast)
        return (
            is_valid(self, source) if self.is_plain_tensor else self.version == version_of(source)
        )

    def _has_values_of(self, source: Tensor, cast: Tensor) -> bool:
        if not self.is_plain_tensor or not has_same_memory(self, source):
            return False
        with torch.no_grad():
            return torch.equal(cast, source.to(cast.dtype))

    def evict(self, _: object = None) -> None:
        """Drop the copy, because its source has changed."""
        self.cast = None
