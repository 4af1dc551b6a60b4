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
from precast.weights.float8.formats import Recipe
from precast.weights.float8.linear import QuantisedWeight
from precast.weights.float8.quantise import Quantised
from precast.weights.held_gradients import with_gradient
from precast.weights.native_copies import Use, native
from precast.weights.view_cache import same_view

__all__ = ["WeightCache", "see_modes"]

_float32: Final = torch.float32


def see_modes(count: Callable[[], int], innermost: Callable[[], Any]) -> None:
    """Replaces the questions about dispatch modes: a mode that only observes must not change what is cached."""
    global dispatch_modes, innermost_dispatch_mode
    dispatch_modes, innermost_dispatch_mode = count, innermost


class WeightCache:
    """Copies by target dtype and source; lives as long as the outermost region of its thread.

    Args:
        holds: whether it keeps copies; one that does not leaves every weight to what runs below.
        is_threads: whether it is its thread's own, which shares its copies with compiled kernels where there are any.
    """

    __slots__ = ("__weakref__", "_entries", "_holds", "_is_threads", "_modes", "_storages")

    def __init__(self, *, holds: bool = True, is_threads: bool = False) -> None:
        self._holds = holds
        self._is_threads = is_threads
        self._entries: dict[tuple[int, torch.dtype], CachedCast] = {}
        """By ``id(source)`` and target dtype."""
        self._storages: dict[tuple[int, torch.dtype], Any] = {}
        """A reference to the storage of each source: an address is given out again when it is freed."""
        self._modes: weakref.WeakKeyDictionary[Any, WeightCache] | None = None

    def clear(self) -> None:
        """Drops every copy that does not outlive regions."""
        self._storages.clear()
        self._entries.clear()
        self._modes = None
        if self._is_threads and native.copies is not None:
            native.copies.clear()

    def __len__(self) -> int:
        """How many copies there are in this thread, those that outlive regions too."""
        kept = sum(entry.cast is not None for entry in self._entries.values())
        return kept + (native.copies.count() if self._is_threads and native.copies else 0)

    def invalidate(self, parameters: Collection[Tensor], dtype: torch.dtype | None = None) -> None:
        """Makes the copies of these leaves, in one dtype or in all, anew at their next use."""
        if self._entries:
            written = set(map(id, parameters))
            known = [key for key in self._entries if key[0] in written and dtype in (None, key[1])]
            for key in known:
                del self._entries[key]
        for cache in () if self._modes is None else list(self._modes.values()):
            cache.invalidate(parameters, dtype)
        if self._is_threads and native.copies is not None:
            native.copies.invalidate(parameters, dtype)

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
        return self._find(leaf, dtype) is not None and _is_kept_by_pytorch(leaf)

    def quantised(
        self, weight: Tensor, recipe: Recipe, *, backward: bool
    ) -> QuantisedWeight | None:
        """What an attachment holds of a weight in 8 bits; None where each use quantises it.

        Args:
            weight: the weight, a matrix.
            recipe: how it is scaled.
            backward: whether the gradient of what it is multiplied with will be asked for.
        """
        if not (held.held_parameters and self._holds) or _is_transformed():
            return None
        held_parameter = held.held_parameters.get(id(weight))
        if held_parameter is None or held_parameter.suspended:
            return None
        forward = held.handle_of(weight, recipe.weight)
        if forward is None:
            return None
        same = recipe.weight_for_input == recipe.weight
        other = held.handle_of(weight, recipe.weight_for_input) if backward and not same else None
        numbers = _numbers(forward)
        assert numbers is not None
        kept = (numbers if same else _numbers(other)) if backward else None
        return QuantisedWeight(numbers, kept, forward.copy.count_gradient)

    def _find(self, leaf: Tensor, dtype: torch.dtype) -> Tensor | None:
        """The copy that stands for a leaf in this region, if there is one."""
        entry = self._entries.get((id(leaf), dtype))
        if entry is not None and entry.stands_for(leaf):
            return entry.cast
        return native.copies.find(leaf, dtype) if self._is_threads and native.copies else None

    def _held(self, tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
        """What an attachment holds of a parameter, or of a view of one."""
        if _is_transformed():
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
            if self._uses_kernels() and not held_parameter.overlapping:
                held_parameter.leave_to_regions(True)
            return None
        handle = held.handle_of(tensor, dtype)
        if handle is None:
            return None
        if needs_grad:
            return self._with_gradient(handle, tensor, dtype)
        lasts = not is_grad_enabled()
        if (
            self._uses_kernels()
            and not (lasts and held_parameter.overlapping)
            and not is_captured(tensor)
            and handle.copy.has_run()
        ):
            use = Use.PERSISTENT if lasts else Use.PER_REGION
            handle.copy.keep_for_kernels(tensor, handle.tensor, handle, use)
        return handle.tensor

    def _with_gradient(
        self,
        handle: held.CopyHandle,
        tensor: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """The cast that stands for a held copy in this region's graph."""
        known = self._find(tensor, dtype)
        if known is not None:
            return known
        cast = with_gradient(tensor, handle.tensor, handle.copy.gradient)
        if self._uses_kernels():
            handle.copy.keep_for_kernels(tensor, cast, handle, Use.LEAF)
            held.lend(handle, tensor)
        else:
            entry = self._entries[id(tensor), dtype] = CachedCast(tensor, handle=handle)
            entry.cast = cast
        return cast

    def _uses_kernels(self) -> bool:
        """Whether compiled kernels use the copies of this thread."""
        return self._is_threads and native.is_used

    def _leaf(self, tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
        plain = is_plain(type(tensor))
        key = id(tensor), dtype
        known = self._entries.get(key)
        if known is not None:
            if known.stands_for(tensor):
                return known.cast
            known.evict()
        if not _holdable(tensor, plain):
            return _once(tensor, dtype)
        if plain and counts_versions(tensor) and self._uses_kernels() and native.copies is not None:
            return native.copies.copy_of(tensor, dtype)
        entry = CachedCast(tensor, plain=plain)  # before the cast: see there
        cast = entry.cast = _graph_cast(tensor, dtype)
        if type(cast) is Tensor or type(cast) is type(tensor):  # else a tracer's, no use outside
            self._entries[key] = entry
            if plain:
                self._storages[key] = weakref.ref(tensor.untyped_storage(), entry.evict)
        return cast


def _is_kept_by_pytorch(tensor: Tensor) -> bool:
    return (
        tensor.requires_grad
        and not is_view(tensor)  # before the next: of a view whose base was written, that may raise
        and tensor.is_leaf
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


def _is_transformed() -> bool:
    """Whether operations are recorded or transformed, so that what is held may not stand for its parameter."""
    return is_tracing() or dispatch_modes() > 0 or is_functorch_active() or in_forward_mode()


def _numbers(handle: held.CopyHandle | None) -> Quantised | None:
    """What a held copy in 8 bits is multiplied as."""
    if handle is None or handle.scales is None:
        return None
    return Quantised(handle.tensor, handle.scales[1])


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
