"""Staleness check for low-precision copies of weights.

A copy is valid while its source tensor has the version counter, data pointer, shape and strides that were recorded
when the copy was made. The C++ kernels apply the same check (`native/copies.h`) and also compare the storage.
In Python a weak reference to the storage serves for that.

Invariant: the version is read before the copy is made. A concurrent write by another thread then makes the copy stale.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from precast._torch import counts_versions, version_if_counted, version_of

__all__ = ["CachedCast", "SourceSnapshot", "has_same_layout", "has_same_memory", "is_valid"]


class SourceSnapshot(Protocol):
    """Version counter, data pointer, shape and strides of a tensor at the time it was cast."""

    shape: torch.Size
    stride: tuple[int, ...]

    @property
    def version(self) -> int:
        """The version counter."""

    @property
    def pointer(self) -> int:
        """The data pointer."""


def is_valid(snapshot: SourceSnapshot, source: Tensor) -> bool:
    """Return True if `source` has not changed since `snapshot` was taken.

    `source` must track versions (not an inference tensor).
    """
    return snapshot.version == version_of(source) and has_same_memory(snapshot, source)


def has_same_memory(snapshot: SourceSnapshot, source: Tensor) -> bool:
    """Return True if the data pointer, shape and strides are unchanged. Ignores the version counter."""
    return snapshot.pointer == source.data_ptr() and has_same_layout(snapshot, source)


def has_same_layout(snapshot: SourceSnapshot, source: Tensor) -> bool:
    """Return True if the shape and strides are unchanged."""
    return snapshot.shape == source.shape and snapshot.stride == source.stride()


class CachedCast:
    """A low-precision copy with the version counter, data pointer, shape and strides of its source.

    These exist if the source `is_plain_tensor`: it stores its elements at a data pointer (no wrapper subclass).
    """

    __slots__ = ("__weakref__", "cast", "is_plain_tensor", "pointer", "shape", "stride", "version")

    def __init__(self, source: Tensor, *, is_plain_tensor: bool) -> None:
        self.cast: Tensor | None = None
        # A nested tensor has no shape, and no operation changes its layout in place.
        self.is_plain_tensor = is_plain_tensor = is_plain_tensor and not source.is_nested
        self.version = version_if_counted(source) or 0
        self.pointer = source.data_ptr() if is_plain_tensor else 0
        self.shape = source.shape if is_plain_tensor else torch.Size()
        self.stride = source.stride() if is_plain_tensor else ()

    def is_valid_for(self, source: Tensor) -> bool:
        """Return True if the cast equals a cast of `source` in its present state.

        A tensor made in inference mode has no version counter. Its values are compared instead.
        """
        if self.cast is None:
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
