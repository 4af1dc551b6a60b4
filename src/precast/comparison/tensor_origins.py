"""The rows of a recording that wrote the memory of a tensor.

Invariants: an entry ends with its storage; a write to a part of a storage adds its row to those before, and a write to
all of it replaces them.
"""

from __future__ import annotations

import weakref
from typing import Final, NamedTuple

from torch import Tensor, UntypedStorage

from precast import _torch
from precast.comparison.recording_file import RowInput

__all__ = ["TensorOrigins", "is_measurable"]

_MOST: Final = 64
"""The most rows of one storage: the earliest are dropped, as of a cache that is written at each token."""


_Geometry = tuple[int, tuple[int, ...], tuple[int, ...]]
"""The first element of a tensor in its storage, the sizes and the strides."""


class _Origin(NamedTuple):
    rows: tuple[int, ...]
    geometry: _Geometry
    """That of the latest write."""
    version: int | None
    is_leaf: bool
    """True if the latest row is of a tensor that no recorded operation computed: it covers no other part."""


def is_measurable(tensor: Tensor) -> bool:
    """Return True for a dense tensor with data in memory."""
    return (
        _torch.is_plain(type(tensor))
        and not _torch.is_functorch_wrapper(tensor)
        and tensor.device.type != "meta"
        and not tensor.is_sparse
        and _torch.has_dense_keys(tensor)
    )


class TensorOrigins:
    """Maps the memory of tensors that are alive to the rows that wrote it."""

    def __init__(self) -> None:
        self._origins: weakref.WeakKeyDictionary[UntypedStorage, _Origin] = (
            weakref.WeakKeyDictionary()
        )

    def clear(self) -> None:
        """Forget everything."""
        self._origins.clear()

    def of(self, tensor: Tensor) -> RowInput | None:
        """Return the rows that wrote a tensor's memory, and the view of it; None for memory that is not recorded."""
        origin = self._origins.get(tensor.untyped_storage())
        if origin is None:
            return None
        geometry = _geometry(tensor)
        if origin.is_leaf and not _is_inside(geometry, origin.geometry):
            return None
        offset, shape, strides = geometry
        view = f"{[*shape]} from element {offset} with strides {[*strides]}"
        return RowInput(origin.rows, "" if geometry == origin.geometry else view)

    def latest(self, tensor: Tensor) -> int | None:
        """Return the row whose tensor this is, as a whole and not written since; else None."""
        origin = self._origins.get(tensor.untyped_storage())
        if origin is None or len(origin.rows) != 1 or origin.geometry != _geometry(tensor):
            return None
        return origin.rows[0] if origin.version == _torch.version_if_counted(tensor) else None

    def put(self, tensor: Tensor, *rows: int, is_leaf: bool = False) -> None:
        """Record the rows that wrote a tensor, or that of its values; none for memory without values."""
        storage = tensor.untyped_storage()
        origin = self._origins.get(storage)
        if origin is not None and tensor.numel() * tensor.element_size() < storage.nbytes():
            rows = (*(each for each in origin.rows if each not in rows), *rows)
        version = _torch.version_if_counted(tensor)
        self._origins[storage] = _Origin(rows[-_MOST:], _geometry(tensor), version, is_leaf)

    def pass_on(self, tensor: Tensor, inputs: tuple[RowInput, ...]) -> None:
        """Give a result that was not measured the rows of the tensors that it was computed from."""
        rows = dict.fromkeys(row for each in inputs for row in each.rows)
        if rows:
            self.put(tensor, *rows)


def _geometry(tensor: Tensor) -> _Geometry:
    """Return the geometry, which is the same for all shapes of contiguous elements."""
    offset = int(tensor.storage_offset())
    if tensor.is_contiguous():
        return offset, (tensor.numel(),), (1,)
    return offset, tuple(tensor.shape), tensor.stride()


def _is_inside(one: _Geometry, other: _Geometry) -> bool:
    """Return True if the memory from the first to the last element of a view is inside that of another one."""
    (start, end), (outer_start, outer_end) = (
        (offset, offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)))
        for offset, shape, strides in (one, other)
    )
    return outer_start <= start and end <= outer_end
