"""The rows of a recording that wrote the memory of a tensor.

Invariants: storages are referenced weakly, and an entry ends with its storage; a write to a part of a storage adds its
row to those before, and a write to all of it replaces them.
"""

from __future__ import annotations

import math
import weakref
from typing import Any, Final, NamedTuple

from torch import Tensor

from precast import _torch
from precast.comparison.recording_file import RowInput

__all__ = ["TensorOrigins", "is_measurable"]

_MOST: Final = 64
"""The most rows of one storage: the earliest are dropped, as of a cache that is written at each token."""

_Geometry = tuple[int, tuple[int, ...], tuple[int, ...]]


class _Origin(NamedTuple):
    storage: weakref.ref[Any]
    rows: tuple[int, ...]
    geometry: _Geometry
    """Offset, sizes and strides of the latest write."""
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
        self._origins: dict[int, _Origin] = {}

    def clear(self) -> None:
        """Forget everything."""
        self._origins.clear()

    def of(self, tensor: Tensor) -> RowInput | None:
        """Return the rows that wrote a tensor's memory, and the view of it; None for memory that is not recorded."""
        origin = self._origin(tensor)
        if origin is None:
            return None
        geometry = _geometry(tensor)
        if origin.is_leaf and not _is_inside(geometry, origin.geometry):
            return None
        same = _have_same_order(geometry, origin.geometry)
        return RowInput(origin.rows, "" if same else _view_text(geometry))

    def latest(self, tensor: Tensor) -> int | None:
        """Return the row whose tensor this is, as a whole and not written since; else None."""
        origin = self._origin(tensor)
        if origin is None or len(origin.rows) != 1:
            return None
        if not _have_same_order(origin.geometry, _geometry(tensor)):
            return None
        same = origin.version == _torch.version_if_counted(tensor)
        return origin.rows[0] if same else None

    def put(self, tensor: Tensor, row: int, *, is_leaf: bool) -> None:
        """Record that a row wrote a tensor, or has the values of one that no recorded operation computed."""
        self._set(tensor, (row,), is_leaf=is_leaf)

    def put_uninitialized(self, tensor: Tensor) -> None:
        """Record that a tensor has memory without values, which no operation reads."""
        self._set(tensor, ())

    def pass_on(self, tensor: Tensor, inputs: list[RowInput]) -> None:
        """Give a result that was not measured the rows of the tensors that it was computed from."""
        rows = dict.fromkeys(row for each in inputs for row in each.rows)
        if rows:
            self._set(tensor, tuple(rows)[-_MOST:])

    def _set(self, tensor: Tensor, rows: tuple[int, ...], *, is_leaf: bool = False) -> None:
        storage = tensor.untyped_storage()
        origin = self._origin(tensor)
        if origin is not None and tensor.numel() * tensor.element_size() < storage.nbytes():
            rows = (*(each for each in origin.rows if each not in rows), *rows)[-_MOST:]
        key, origins = id(storage), self._origins
        reference = (
            origin.storage
            if origin is not None
            else weakref.ref(storage, lambda reference: _forget(origins, key, reference))
        )
        origins[key] = _Origin(
            reference, rows, _geometry(tensor), _torch.version_if_counted(tensor), is_leaf
        )

    def _origin(self, tensor: Tensor) -> _Origin | None:
        storage = tensor.untyped_storage()
        origin = self._origins.get(id(storage))
        return origin if origin is not None and origin.storage() is storage else None


def _forget(origins: dict[int, _Origin], key: int, reference: weakref.ref[Any]) -> None:
    origin = origins.get(key)
    if origin is not None and origin.storage is reference:
        del origins[key]


def _geometry(tensor: Tensor) -> _Geometry:
    return int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()


def _have_same_order(one: _Geometry, other: _Geometry) -> bool:
    """Return True if two views show the same elements in the same order, perhaps in other shapes."""
    if one == other:
        return True
    return (
        one[0] == other[0]
        and math.prod(one[1]) == math.prod(other[1])
        and _is_contiguous(one)
        and _is_contiguous(other)
    )


def _is_inside(one: _Geometry, other: _Geometry) -> bool:
    """Return True if the memory from the first to the last element of a view is inside that of another one."""
    (start, end), (outer_start, outer_end) = (
        (offset, offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)))
        for offset, shape, strides in (one, other)
    )
    return outer_start <= start and end <= outer_end


def _is_contiguous(geometry: _Geometry) -> bool:
    _, shape, strides = geometry
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _view_text(geometry: _Geometry) -> str:
    offset, shape, strides = geometry
    return f"{list(shape)} from element {offset} with strides {list(strides)}"
