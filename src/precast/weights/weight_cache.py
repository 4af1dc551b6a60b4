"""The weight cache: lower-precision copies of float32 weights, made once a region and never staler than PyTorch's.

Invariants:

- it keeps from one use to the next what PyTorch's cache keeps, and nothing else: leaves that require grad, are no views
  and not managed by CUDA-graph trees, outside of inference mode. A write through `.data` or NumPy moves no counter, so
  a copy that PyTorch does not keep could be staler than PyTorch. Attaching the model keeps more copies;
- an entry is used only while its source has the same version counter and the same storage as when it was cast, so an
  in-place update or `p.data = other` is seen, which PyTorch does not see;
- entries are kept by target dtype: regions of two dtypes never share a copy;
- a copy carries its source's gradient, under `no_grad` too, so it is right in what follows. It holds its source through
  its graph, as PyTorch's does, so while there is a copy no other tensor has the source's `id`;
- no weak reference to a tensor outlives the copies: PyTorch exchanges no tensors that are referenced weakly
  (`torch.utils.swap_tensors`). Those to held parameters are the attachment's;
- a weight that PyTorch would keep and this cache cannot is cast here all the same, so that PyTorch's never has it;
- while `torch.jit.trace` records, each use is a cast of its own: a copy would be a constant of the graph;
- under a dispatch mode (a checkpoint that selects what it saves, a tracer) only copies made under that very mode
  are used: what it records is then the same whenever it runs again;
- what an attachment holds stands here for its parameter, and for views of it, while that is as it was copied.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Any, Final

import torch
from torch import Tensor, is_grad_enabled, is_inference_mode_enabled
from torch.nn import Parameter

from precast._torch import (
    base_of,
    cast_without_torch_function,
    counts_versions,
    dispatch_modes,
    in_ddp,
    in_forward_mode,
    innermost_dispatch_mode,
    is_captured,
    is_functorch_active,
    is_functorch_wrapper,
    is_in_graph_tree,
    is_on,
    is_plain,
    is_tracing,
    is_view,
    outside_inference_mode,
)
from precast.weights import held
from precast.weights.cached_cast import CachedCast
from precast.weights.freshness import is_at
from precast.weights.held_gradients import with_gradient
from precast.weights.view_cache import same_view

__all__ = ["WeightCache", "see_modes"]

_float32: Final = torch.float32


def see_modes(count: Callable[[], int], innermost: Callable[[], Any]) -> None:
    """Replaces the questions about dispatch modes: a mode that only observes must not change what is cached."""
    global dispatch_modes, innermost_dispatch_mode
    dispatch_modes, innermost_dispatch_mode = count, innermost


Table = defaultdict[torch.dtype, dict[int, CachedCast]]
"""Target dtype -> ``id(source)`` -> copy."""


class WeightCache:
    """Copies by target dtype and source; lives as long as the outermost region of its thread.

    One that does not hold leaves every weight to what runs below.
    """

    __slots__ = (
        "__weakref__",
        "_held_entries",
        "_holds",
        "_modes",
        "_storages",
        "_wrapped",
        "leaves",
        "per_region",
        "persistent",
    )

    def __init__(self, *, holds: bool = True) -> None:
        self._holds = holds
        self.leaves: Table = defaultdict(dict)
        """What carries a gradient, for this region; the hot path of a kernel reads it directly."""
        self.persistent: Table = defaultdict(dict)
        """Held copies where no gradient is recorded: they outlive regions, and so do their entries here."""
        self.per_region: Table = defaultdict(dict)
        """Held copies of frozen weights where gradients are recorded, for this region."""
        self._held_entries: Table = defaultdict(dict)
        """The entries of held copies in `leaves` and those of earlier regions, which have no copy."""
        self._wrapped: Table = defaultdict(dict)
        """Copies of what the hot path cannot look at: wrappers of tensors, and tensors that count no versions."""
        self._storages: dict[tuple[int, torch.dtype], Any] = {}
        """A reference to the storage of each source: an address is given out again when it is freed."""
        self._modes: weakref.WeakKeyDictionary[Any, WeightCache] | None = None

    def clear(self) -> None:
        """Drops every copy that does not outlive regions."""
        for entries in self._held_entries.values():
            for entry in list(entries.values()):
                entry.cast = None
        self._storages.clear()
        self.leaves.clear()
        self.per_region.clear()
        if self._wrapped:
            self._wrapped.clear()
        self._modes = None

    def invalidate(self, parameters: Collection[Tensor]) -> None:
        """Makes the copies of these leaves anew at their next use, whatever version counters say."""
        for table in (self.leaves, self._wrapped):
            for entries in table.values():
                for key in map(id, parameters):
                    entry = entries.get(key)
                    if entry is not None:
                        entry.version = -1
        for cache in () if self._modes is None else list(self._modes.values()):
            cache.invalidate(parameters)

    def cast(self, tensor: object, dtype: torch.dtype, device_type: str) -> Tensor | None:
        """The copy of `tensor` in `dtype`, made now if need be; None where each use casts it."""
        if type(tensor) is not Parameter and not isinstance(tensor, Tensor):
            return None
        if tensor.dtype is not _float32 or not self._holds or not is_on(device_type)(tensor):
            return None
        if held.held_parameters and (copy := self._held(tensor, dtype)) is not None:
            return copy
        if not _is_kept_by_pytorch(tensor):
            return None
        if is_tracing():
            return _once(tensor, dtype)
        if not dispatch_modes():
            return self._leaf(tensor, dtype)
        if self._modes is None:
            self._modes = weakref.WeakKeyDictionary()
        return self._modes.setdefault(innermost_dispatch_mode(), WeightCache())._leaf(tensor, dtype)

    def has(self, leaf: Tensor, dtype: torch.dtype) -> bool:
        """Whether the next use of a leaf in this region casts nothing, as there is a copy."""
        held_parameter = held.held_parameters.get(id(leaf)) if held.held_parameters else None
        if held_parameter is not None and not held_parameter.suspended:
            copy = held_parameter.copies.get(dtype)
            if copy is not None and copy.is_fresh_for(leaf):
                return not _needs_grad(leaf) or leaf.numel() >= held.MIN_ELEMENTS_FOR_NODE
        entry = self.leaves[dtype].get(id(leaf))
        if entry is None or entry.cast is None or not entry.is_fresh_for(leaf):
            return False
        return _is_kept_by_pytorch(leaf)

    def _held(self, tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
        """What an attachment holds of a parameter, or of a view of one."""
        if is_tracing() or dispatch_modes() or is_functorch_active() or in_forward_mode():
            return None
        held_parameter = held.held_parameters.get(id(tensor))
        if held_parameter is None:
            return _held_view(tensor, dtype)
        if held_parameter.suspended:  # it may be written unseen between two uses
            return cast_without_torch_function(tensor, dtype)
        needs_grad = _needs_grad(tensor)
        if needs_grad and tensor.numel() < held.MIN_ELEMENTS_FOR_NODE:
            if held_parameter.copies:
                held_parameter.invalidate()  # they are for evaluation, and training may write it unseen
            return None
        handle = held.handle_of(tensor, dtype)
        if handle is None:
            return None
        if needs_grad:
            return self._with_gradient(handle, held_parameter, tensor, dtype)
        lasts = not is_grad_enabled()
        if (
            not (lasts and held_parameter.overlapping)
            and not is_captured(tensor)
            and handle.copy.has_run()
        ):
            table = self.persistent if lasts else self.per_region
            entry = table[dtype][id(tensor)] = self._entry(tensor, dtype)
            _stand_for(entry, handle, handle.tensor, lasts=lasts)
        return handle.tensor

    def _with_gradient(
        self,
        handle: held.CopyHandle,
        held_parameter: held.HeldParameter,
        tensor: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """The cast that stands for a held copy in this region's graph."""
        entry = self.leaves[dtype].get(id(tensor))
        if entry is not None and entry.is_fresh_for(tensor) and (cast := entry.cast) is not None:
            return cast
        if held_parameter.grad_dtype is not None and tensor.grad is None:
            tensor.grad_dtype = torch.float32 if in_ddp() else held_parameter.grad_dtype
        cast = with_gradient(tensor, handle.tensor, handle.copy.gradient)
        known = self._held_entries[dtype].get(id(tensor))
        if known is None or not is_at(known, tensor) or known.pointer != handle.pointer:
            known = self._held_entries[dtype][id(tensor)] = self._entry(tensor, dtype)
        _stand_for(known, handle, cast, lasts=False)
        self.leaves[dtype][id(tensor)] = known
        return cast

    def _entry(self, tensor: Tensor, dtype: torch.dtype) -> CachedCast:
        """An entry that stands for a held copy, and is forgotten with the parameter."""
        entry, key, here = CachedCast(tensor), id(tensor), weakref.ref(self)

        def forget(_: Any) -> None:
            cache = here()
            if cache is not None:
                for table in (
                    cache.leaves,
                    cache.persistent,
                    cache.per_region,
                    cache._held_entries,
                ):
                    table.get(dtype, {}).pop(key, None)

        entry.owner = weakref.ref(tensor, forget)
        entry.storage = weakref.ref(tensor.untyped_storage(), forget)
        return entry

    def _leaf(self, tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
        plain = is_plain(type(tensor))
        counted = counts_versions(tensor)
        table = self.leaves if plain and counted else self._wrapped
        entries, key = table[dtype], id(tensor)
        entry = entries.get(key)
        if entry is not None:
            if entry.is_fresh_for(tensor) if counted else entry.has_numbers_of(tensor):
                return entry.cast
            entry.evict()
        if not _holdable(tensor, plain):
            return _once(tensor, dtype)
        entry = CachedCast(tensor, plain=plain, counted=counted)  # before the cast: see there
        cast = entry.cast = _graph_cast(tensor, dtype)
        if type(cast) is Tensor or type(cast) is type(tensor):  # else a tracer's, no use outside
            entries[key] = entry
            if plain:
                storage = tensor.untyped_storage()
                self._storages[key, dtype] = weakref.ref(storage, entry.evict)
        return cast


def _is_kept_by_pytorch(tensor: Tensor) -> bool:
    return (
        tensor.requires_grad
        and tensor.is_leaf
        and not is_view(tensor)
        and not is_inference_mode_enabled()
        and not is_in_graph_tree(tensor)
    )


def _held_view(tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
    """The same view of what an attachment holds of a parameter."""
    base = base_of(tensor)
    if base is None or id(base) not in held.held_parameters or _needs_grad(tensor):
        return None
    handle = held.handle_of(base, dtype)
    return None if handle is None else same_view(handle.tensor, base, tensor)


def _stand_for(entry: CachedCast, handle: held.CopyHandle, cast: Tensor, *, lasts: bool) -> None:
    """Has an entry stand for a held copy: with what its parameter was when it was copied, not what it is now."""
    entry.pointer = handle.pointer
    entry.renew(cast, handle.version)
    handle.copy.used_by(entry, handle, lasts=lasts)


def _needs_grad(tensor: Tensor) -> bool:
    return tensor.requires_grad and is_grad_enabled()


def _holdable(tensor: Tensor, plain: bool) -> bool:
    # Under a functorch transform tensors are wrappers of one call; a wrapper that cannot be flattened is a tracer's.
    return (
        tensor.layout is torch.strided
        and not is_functorch_active()
        and (plain or hasattr(type(tensor), "__tensor_flatten__"))
    )


def _once(tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
    """A copy for this call; None for a functorch wrapper, which PyTorch holds for as long as its transform runs."""
    return None if is_functorch_wrapper(tensor) else cast_without_torch_function(tensor, dtype)


def _graph_cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if is_grad_enabled():
        return cast_without_torch_function(tensor, dtype)
    with outside_inference_mode():
        return cast_without_torch_function(tensor, dtype)
