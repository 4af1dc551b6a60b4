"""Staleness check for low-precision copies of weights.

A copy is valid while its source tensor has the version counter, data pointer, shape and strides that were recorded
when the copy was made. The C++ kernels apply the same check (`native/copies.h`) and also compare the storage.
In Python a weak reference to the storage serves for that.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from precast._torch import version_of

__all__ = ["SourceSnapshot", "has_same_layout", "has_same_memory", "is_valid"]


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
