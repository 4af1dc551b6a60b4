"""The weight cache: low-precision copies of float32 weights, made once per region.

Invariants:

- it keeps the copies that PyTorch's cache keeps, and no others: of leaves that require grad, are not views and not
  managed by CUDA-graph trees, outside of inference mode. Writes through `.data` or NumPy do not move version counters,
  so another copy could be out of date where PyTorch's result is not. Attaching the model keeps more copies;
- an entry is used only while its source has the same version counter and storage as when it was cast. So in-place
  updates and `p.data = other` are noticed, which PyTorch does not do;
- entries are keyed by target dtype: regions of two dtypes never share a copy;
- a copy carries its source's gradient, under `no_grad` too, so that it is right for later uses. It references its
  source through the graph, as in PyTorch, so while the copy lives no other tensor gets the source's `id`;
- no weak reference to a tensor outlives the copies, because `torch.utils.swap_tensors` refuses tensors with weak
  references. References to held parameters belong to the attachment;
- a weight that PyTorch would keep and this cache cannot is cast here all the same, so that PyTorch never caches it;
- while `torch.jit.trace` records, each use is a separate cast, because a copy would be a constant of the graph;
- under a dispatch mode (a selective checkpoint, a tracer) only copies made under the same mode are used, so the mode
  records the same operations whenever it runs again;
- a valid held copy is used in place of its parameter, and of views of the parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any, Final

import torch
from torch import Tensor, is_grad_enabled, is_inference_mode_enabled
from torch.nn import Parameter

from precast._torch import (
    base_of,
    cast_without_torch_function,
    counts_versions,
    dispatch_modes,
    impl_address,
    in_forward_mode,
    is_captured,
    is_functorch_active,
    is_functorch_wrapper,
    is_in_graph_tree,
    is_on,
    is_plain,
    is_tracing,
    is_view,
    other_modes,
    outside_inference_mode,
)
from precast.weights import held
from precast.weights.float8.formats import Recipe
from precast.weights.float8.linear import QuantisedWeight
from precast.weights.float8.quantise import Quantised
from precast.weights.freshness import CachedCast
from precast.weights.native.api import native_engine
from precast.weights.view_cache import same_view

__all__ = ["WeightCache"]

_float32: Final = torch.float32


class WeightCache:
    """Copies by source and target dtype, kept until the outermost region of the thread ends.

    Args:
        holds: keep copies. If False, every weight is left to PyTorch's kernels.
        is_threads: True for the thread's main cache, which shares its copies with compiled kernels.
    """

    __slots__ = ("__weakref__", "_entries", "_holds", "_is_threads", "_modes", "_storages")

    def __init__(self, *, holds: bool = True, is_threads: bool = False) -> None:
        self._holds = holds
        self._is_threads = is_threads
        self._entries: dict[tuple[int, torch.dtype], CachedCast] = {}
        """By ``id(source)`` and target dtype."""
        self._storages: dict[tuple[int, torch.dtype], Any] = {}
        """A weak reference to the storage of each source, because the address of a freed storage may be reused."""
        self._modes: weakref.WeakKeyDictionary[Any, WeightCache] | None = None

    def clear(self) -> None:
        """Drop the copies that do not outlive regions."""
        self._storages.clear()
        self._entries.clear()
        self._modes = None
        if self._is_threads and native_engine.api is not None:
            native_engine.api.clear()

    def __len__(self) -> int:
        """Return the number of copies in this thread, held ones included."""
        count = sum(entry.cast is not None for entry in self._entries.values())
        return count + (native_engine.api.count() if self._is_threads and native_engine.api else 0)

    def invalidate(self, parameters: Collection[Tensor], dtype: torch.dtype | None = None) -> None:
        """Drop the copies of these leaves, in one dtype or in all."""
        if self._entries:
            sources = set(map(id, parameters))
            stale = [key for key in self._entries if key[0] in sources and dtype in (None, key[1])]
            for key in stale:
                del self._entries[key]
        for cache in () if self._modes is None else list(self._modes.values()):
            cache.invalidate(parameters, dtype)
        api = native_engine.api
        if self._is_threads and api is not None and api.has_leaves():
            for parameter in parameters:
                api.invalidate(impl_address(parameter), dtype)

    def cast(self, tensor: object, dtype: torch.dtype, device_type: str) -> Tensor | None:
        """Return the copy of `tensor` in `dtype`, cached or new; None if the caller should cast it for this use."""
        if type(tensor) is not Parameter and not isinstance(tensor, Tensor):
            return None
        if tensor.dtype is not _float32 or not self._holds or not is_on(device_type)(tensor):
            return None
        if held.held_parameters and (copy := self._held(tensor, dtype)) is not None:
            return copy
        if not _is_kept_by_pytorch(tensor):
            return None
        if is_tracing():
            return _uncached_cast(tensor, dtype)
        # A mode that only observes must not change what is cached.
        modes = other_modes() if dispatch_modes() else None
        if not modes:
            return self._leaf(tensor, dtype)
        if self._modes is None:
            self._modes = weakref.WeakKeyDictionary()
        return self._modes.setdefault(modes[-1], WeightCache())._leaf(tensor, dtype)

    def has(self, leaf: Tensor, dtype: torch.dtype) -> bool:
        """Return True if the next use of a leaf in this region finds a copy."""
        held_parameter = held.held_parameters.get(id(leaf)) if held.held_parameters else None
        if held_parameter is not None and not held_parameter.suspended:
            copy = held_parameter.copies.get(dtype)
            if copy is not None and copy.is_valid_for(leaf):
                return not _needs_grad(leaf) or held.is_held_in_training(leaf)
        return self._find(leaf, dtype) is not None and _is_kept_by_pytorch(leaf)

    def quantised(
        self, weight: Tensor, recipe: Recipe, *, backward: bool
    ) -> QuantisedWeight | None:
        """Return a matrix in 8 bits, as held by an attachment; None if it is not held.

        `backward` is True if the gradient of the other operand will be computed.
        """
        if not (held.held_parameters and self._holds) or _is_transformed():
            return None
        held_parameter = held.held_parameters.get(id(weight))
        if held_parameter is None or held_parameter.suspended:
            return None
        forward = held.handle_of(weight, recipe.weight)
        if forward is None:
            return None
        is_shared = recipe.weight_for_input == recipe.weight
        other = None
        if backward and not is_shared:
            other = _quantised(held.handle_of(weight, recipe.weight_for_input))
        values = _quantised(forward)
        assert values is not None
        return QuantisedWeight(
            values, values if backward and is_shared else other, forward.copy.count_gradient
        )

    def _find(self, leaf: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return the valid copy of a leaf in this region, if any."""
        entry = self._entries.get((id(leaf), dtype))
        if entry is not None and entry.is_valid_for(leaf):
            return entry.cast
        api = native_engine.api
        if not self._is_threads or api is None or not api.has(impl_address(leaf), dtype):
            return None
        copy: Tensor | None = api.operations.find.default(leaf, dtype)
        return copy

    def _held(self, tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return the held copy of a parameter, or the corresponding view of one."""
        if _is_transformed():
            return None
        held_parameter = held.held_parameters.get(id(tensor))
        if held_parameter is None:
            return _held_view(tensor, dtype)
        if (
            held_parameter.suspended
        ):  # it may be written between two uses without moving its counter
            return cast_without_torch_function(tensor, dtype)
        needs_grad = _needs_grad(tensor)
        if needs_grad and not held.is_held_in_training(tensor):
            if held_parameter.copies:
                held_parameter.invalidate()  # they are for evaluation, and training may write the weight unnoticed
            if self._uses_kernels() and not held_parameter.overlapping:
                held_parameter.set_cast_per_region(True)
            return None
        handle = held.handle_of(tensor, dtype)
        if handle is None:
            return None
        if needs_grad:
            return self._with_gradient(handle, tensor, dtype)
        # Kernels see neither writes to other parameters in its memory nor gradients through its other copies.
        is_alone = not held_parameter.overlapping and (
            len(held_parameter.copies) == 1 or not tensor.requires_grad
        )
        if (
            self._uses_kernels()
            and is_alone
            and not is_captured(tensor)
            and handle.copy.is_written()
        ):
            handle.copy.keep_for_kernels(tensor, handle.tensor, handle, has_gradient=False)
        return handle.tensor

    def _with_gradient(self, handle: held.CopyHandle, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the cast of a held copy in this region's graph."""
        existing = self._find(tensor, dtype)
        if existing is not None:
            return existing
        cast = handle.copy.with_gradient(tensor, handle.tensor)
        handle.copy.keep_for_kernels(tensor, cast, handle, has_gradient=True)
        held.lend(handle, tensor)
        return cast

    def _uses_kernels(self) -> bool:
        """Return True if compiled kernels use the copies of this thread."""
        return self._is_threads and native_engine.is_used

    def _leaf(self, tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
        is_plain_tensor = is_plain(type(tensor))
        key = id(tensor), dtype
        entry = self._entries.get(key)
        if entry is not None:
            if entry.is_valid_for(tensor):
                return entry.cast
            entry.evict()
        if not _is_cacheable(tensor, is_plain_tensor):
            return _uncached_cast(tensor, dtype)
        if (
            is_plain_tensor
            and counts_versions(tensor)
            and self._uses_kernels()
            and native_engine.api is not None
        ):
            copy: Tensor = native_engine.api.operations.copy_of.default(tensor, dtype)
            return copy
        entry = CachedCast(
            tensor, is_plain_tensor=is_plain_tensor
        )  # before the cast, see `CachedCast`
        cast = entry.cast = _graph_cast(tensor, dtype)
        if type(cast) is Tensor or type(cast) is type(
            tensor
        ):  # otherwise a tracer's, which is of no use later
            self._entries[key] = entry
            if is_plain_tensor:
                self._storages[key] = weakref.ref(tensor.untyped_storage(), entry.evict)
        return cast


def _is_kept_by_pytorch(tensor: Tensor) -> bool:
    return (
        tensor.requires_grad
        and not is_view(
            tensor
        )  # first, because `is_leaf` may raise for a view whose base was written
        and tensor.is_leaf
        and not is_inference_mode_enabled()
        and not is_in_graph_tree(tensor)
    )


def _held_view(tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return the corresponding view of a held copy, for a view of a held parameter."""
    base = base_of(tensor)
    if base is None or id(base) not in held.held_parameters or _needs_grad(tensor):
        return None
    handle = held.handle_of(base, dtype)
    return None if handle is None else same_view(handle.tensor, base, tensor)


def _is_transformed() -> bool:
    """Return True if operations are recorded or transformed. Held copies are not used then."""
    has_modes = bool(dispatch_modes() and other_modes())
    return is_tracing() or has_modes or is_functorch_active() or in_forward_mode()


def _quantised(handle: held.CopyHandle | None) -> Quantised | None:
    if handle is None or handle.scales is None:
        return None
    return Quantised(handle.tensor, handle.scales[1])


def _needs_grad(tensor: Tensor) -> bool:
    return tensor.requires_grad and is_grad_enabled()


def _is_cacheable(tensor: Tensor, is_plain_tensor: bool) -> bool:
    # Under a functorch transform tensors are wrappers of one call. A subclass that cannot be flattened is a tracer's.
    return (
        tensor.layout is torch.strided
        and not is_functorch_active()
        and (is_plain_tensor or hasattr(type(tensor), "__tensor_flatten__"))
    )


def _uncached_cast(tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Cast for this use only; None for a functorch wrapper, which PyTorch caches while its transform runs."""
    return None if is_functorch_wrapper(tensor) else cast_without_torch_function(tensor, dtype)


def _graph_cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if is_grad_enabled():
        return cast_without_torch_function(tensor, dtype)
    with outside_inference_mode():
        return cast_without_torch_function(tensor, dtype)
