"""The weight cache: lower-precision copies of float32 weights, made once and never stale.

Invariants:

- an entry is used only while its source has the same version counter, the same storage and the same
  `requires_grad` as when it was cast, so an in-place update, `p.data = other` or a freeze is always seen;
- entries are kept by target dtype: regions of two dtypes never share a copy;
- a copy of a tensor that requires grad carries its gradient, whatever the grad mode it was made in, and is
  never an inference tensor; so it is right in every mode that follows;
- in grad mode the cache holds just what PyTorch's holds (leaves that require grad and are no views): sharing a
  copy decides in which precision gradients are summed, and that must not differ from PyTorch. What needs no
  gradient (frozen parameters, views of parameters under `no_grad`) is held too;
- sources are held weakly. (A copy that carries a gradient holds its source through its graph, as PyTorch's does.)
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter

from precast._torch import base_of, is_functorch_active, is_view, version_of

__all__ = ["CachedCast", "WeightCache"]

_float32: Final = torch.float32


class CachedCast:
    """One lower-precision copy, and what its source looked like when it was made."""

    __slots__ = ("cast", "pointer", "requires_grad", "source", "version")

    def __init__(self, source: Tensor, cast: Tensor) -> None:
        self.cast = cast
        self.version = version_of(source)
        self.pointer = source.data_ptr()
        self.requires_grad = source.requires_grad
        self.source: weakref.ref[Tensor] | None = None
        """For a source that its copy's graph does not hold: takes the entry out when the source is gone."""


class WeightCache:
    """Copies by target dtype and source; lives as long as the outermost region of its thread."""

    __slots__ = ("_views", "leaves")

    def __init__(self) -> None:
        self.leaves: defaultdict[torch.dtype, dict[int, CachedCast]] = defaultdict(dict)
        """Target dtype -> ``id(source)`` -> copy; the hot path of a kernel reads it directly."""
        self._views: dict[Any, CachedCast] = {}

    def clear(self) -> None:
        """Drops every copy."""
        self.leaves.clear()
        self._views.clear()

    def cast(self, tensor: object, dtype: torch.dtype, device_type: str) -> Tensor | None:
        """The copy of `tensor` in `dtype`, made now if need be; None where it is no weight on that device type."""
        kind = type(tensor)
        if not (kind is Parameter or kind is Tensor):
            return None
        assert isinstance(tensor, Tensor)
        if tensor.dtype is not _float32 or tensor.device.type != device_type:
            return None
        if tensor.is_leaf and not is_view(tensor):
            return self._leaf(tensor, dtype) if tensor.requires_grad or kind is Parameter else None
        base = base_of(tensor)
        if base is None or type(base) is not Parameter or _needs_grad(tensor):
            return None
        return self._view(tensor, base, dtype)

    def _leaf(self, tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
        entries = self.leaves[dtype]
        key = id(tensor)
        entry = entries.get(key)
        if entry is None or not _current(entry, tensor):
            if not _holdable(tensor):
                return None
            entry = entries[key] = CachedCast(tensor, _graph_cast(tensor, dtype))
            if not entry.requires_grad:
                entry.source = weakref.ref(tensor, lambda _: entries.pop(key, None))
        return entry.cast

    def _view(self, tensor: Tensor, base: Tensor, dtype: torch.dtype) -> Tensor | None:
        # Each forward makes a new view object of the same weight: the base and the geometry are its name.
        key = (id(base), tensor.storage_offset(), tensor.shape, tensor.stride(), dtype)
        entry = self._views.get(key)
        if (
            entry is None
            or entry.version != version_of(tensor)
            or entry.pointer != tensor.data_ptr()
        ):
            if not _holdable(tensor):
                return None
            entry = self._views[key] = CachedCast(tensor, _plain_cast(tensor, dtype))
            entry.source = weakref.ref(base, lambda _: self._views.pop(key, None))
        return entry.cast


def _current(entry: CachedCast, tensor: Tensor) -> bool:
    return (
        entry.pointer == tensor.data_ptr()
        and entry.version == version_of(tensor)
        and entry.requires_grad == tensor.requires_grad
    )


def _needs_grad(tensor: Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def _holdable(tensor: Tensor) -> bool:
    # Inference tensors count no versions; under a functorch transform tensors are wrappers of one call.
    return (
        tensor.layout is torch.strided and not tensor.is_inference() and not is_functorch_active()
    )


def _graph_cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
        return tensor.to(dtype)
    with torch.inference_mode(False), torch.enable_grad():
        return tensor.to(dtype)


def _plain_cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return tensor.to(dtype)
