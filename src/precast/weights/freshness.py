"""Whether a copy still stands for its weight: the condition that caches and held copies share.

Invariants:

- a copy notes the version counter, the address, the shape and the strides that its source had when it was cast;
- it stands for its source while the source has all four. Compiled kernels ask the same (`engine/native/copies.h`), and
  for the very storage, which Python watches by a reference.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from precast._torch import version_of

__all__ = ["SourceNotes", "has_geometry_of", "is_at", "is_fresh"]


class SourceNotes(Protocol):
    """What a copy notes of its source when it is cast."""

    shape: torch.Size
    stride: tuple[int, ...]

    @property
    def version(self) -> int:
        """The source's version counter."""

    @property
    def pointer(self) -> int:
        """The source's address."""


def is_fresh(copy: SourceNotes, source: Tensor) -> bool:
    """Whether the copy still stands for the source; the source must count its versions."""
    return copy.version == version_of(source) and is_at(copy, source)


def is_at(copy: SourceNotes, source: Tensor) -> bool:
    """Whether the source lies in the memory in which it was cast, with the same shape and strides."""
    return copy.pointer == source.data_ptr() and has_geometry_of(copy, source)


def has_geometry_of(copy: SourceNotes, source: Tensor) -> bool:
    """Whether the source has the shape and the strides that it had when it was cast."""
    return copy.shape == source.shape and copy.stride == source.stride()
