"""The weight cache: lower-precision copies of float32 weights, made once and never stale.

Invariants:

- an entry is used only while its source has the same version counter, the same storage and the same
  `requires_grad` as when it was cast, so an in-place update, `p.data = other` or a freeze is always seen;
- a weight that is thawed gets back the copy that it had before it was frozen, as in PyTorch;
- entries are kept by target dtype: regions of two dtypes never share a copy;
- a copy of a tensor that requires grad carries its gradient, under `no_grad` too, so it is right in what follows;
- copies made in inference mode carry none, as PyTorch's, and are used there alone: attention chooses its kernel by
  whether a mask requires grad, whatever the mode (2.14);
- in grad mode the cache holds just what PyTorch's holds (leaves that require grad and are no views): sharing a
  copy decides in which precision gradients are summed, and that must not differ from PyTorch. What needs no
  gradient (views of parameters under `no_grad`, frozen parameters) is held too;
- frozen parameters, and all in inference mode, which PyTorch casts at every use, are held from their second use in a
  region on: a copy that is used once costs more to keep than to drop, for the next is then made in warm memory
  (512x256, one use, 2-core CPU: 64 us dropped, 104 us kept);
- a weight that PyTorch would hold and this cache cannot is cast here all the same, so that PyTorch's never has it;
- while `torch.jit.trace` records, each use is a cast of its own: a copy would be a constant of the graph;
- under a dispatch mode (a checkpoint that selects what it saves, a tracer) only copies made under that very mode
  are used: what it records is then the same whenever it runs again;
- sources are held weakly. (A copy that carries a gradient holds its source through its graph, as PyTorch's does.)
- what never changes about a weight is found out once, not in every region: an entry outlives its copy.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Any, Final

import torch
from torch import Tensor, is_grad_enabled, is_inference_mode_enabled
from torch.nn import Parameter

from precast import held
from precast._torch import (
    base_of,
    counts_versions,
    dispatch_modes,
    in_ddp,
    in_forward_mode,
    innermost_dispatch_mode,
    is_captured,
    is_functorch_active,
    is_functorch_wrapper,
    is_on,
    is_plain,
    is_tracing,
    is_view,
    outside_inference_mode,
    quiet_cast,
    swaps_parameters,
    version_of,
)
from precast.cached_cast import CachedCast
from precast.held_gradients import with_gradient
from precast.views import Forgetful, Views

__all__ = ["WeightCache", "see_modes"]

_float32: Final = torch.float32


def see_modes(count: Callable[[], int], innermost: Callable[[], Any]) -> None:
    """Has this file ask these for dispatch modes: one that only watches must change nothing."""
    global dispatch_modes, innermost_dispatch_mode
    dispatch_modes, innermost_dispatch_mode = count, innermost


class WeightCache:
    """Copies by target dtype and source; lives as long as the outermost region of its thread.

    One that does not hold leaves every weight to what runs below.
    """

    __slots__ = (
        "__weakref__",
        "_holds",
        "_inference",
        "_known",
        "_modes",
        "_views",
        "_wrapped",
        "in_inference_mode",
        "lasting",
        "leaves",
        "used",
    )

    def __init__(self, *, holds: bool = True, inference: bool = False) -> None:
        self._holds = holds
        self._inference = inference
        self.leaves: defaultdict[torch.dtype, dict[int, CachedCast]] = defaultdict(dict)
        """Target dtype -> ``id(source)`` -> copy; the hot path of a kernel reads it directly."""
        self.lasting: defaultdict[torch.dtype, dict[int, CachedCast]] = defaultdict(dict)
        """The same for held weights where no gradient is recorded: entries that outlive regions, as their copies do."""
        self.used: set[int] = set()
        """``id`` of each leaf that was used in this region, and not held yet; the hot path adds to it."""
        self._known: defaultdict[torch.dtype, dict[int, CachedCast]] = defaultdict(dict)
        """The entries of `leaves` and those of earlier regions, which have no copy."""
        self._wrapped: defaultdict[torch.dtype, dict[int, CachedCast]] = defaultdict(dict)
        self._views = Forgetful[Views]()
        self._modes: weakref.WeakKeyDictionary[Any, WeightCache] | None = None
        self.in_inference_mode: WeightCache = (
            self if inference else WeightCache(holds=holds, inference=True)
        )
        """The cache of what is made in inference mode, which is used there alone."""

    def clear(self) -> None:
        """Drops every copy."""
        held = [entry for entries in self.leaves.values() for entry in list(entries.values())]
        for copies in (self.leaves, self._wrapped, self._views):
            if copies:
                copies.clear()
        for entry in held:  # a source may end with its copy, and be forgotten here
            entry.cast = entry.other = None
        if self._known and swaps_parameters():  # PyTorch swaps nothing that is referenced weakly
            self._known.clear()
        self._modes = None
        self.used.clear()
        if not self._inference:
            self.in_inference_mode.clear()

    def distrust(self, parameters: Collection[Tensor]) -> None:
        """Has copies of these leaves made anew at their next use, whatever version counters say."""
        for entries in (entries for entries in self.leaves.values() if entries):
            for key in map(id, parameters):
                entry = entries.get(key)
                if entry is not None:
                    entry.version, entry.other = -1, None
        if self._views:
            for key in map(id, parameters):
                self._views.pop(key, None)
        if not self._inference:
            self.in_inference_mode.distrust(parameters)

    def cast(self, tensor: object, dtype: torch.dtype, device_type: str) -> Tensor | None:
        """The copy of `tensor` in `dtype`, made now if need be; None where it is no weight on that device type."""
        if not isinstance(tensor, Tensor) or tensor.dtype is not _float32 or not self._holds:
            return None
        if not is_on(device_type)(tensor):
            return None
        if is_inference_mode_enabled() and not self._inference:
            return self.in_inference_mode.cast(tensor, dtype, device_type)
        if is_tracing():
            return None if self._inference else _once(tensor, dtype)
        if held.holdings and (lent := self._held(tensor, dtype)) is not None:
            return lent
        known = self._known[dtype].get(id(tensor))
        if (
            known is not None
            and known.requires_grad is tensor.requires_grad
            and known.is_where(tensor)
            and not dispatch_modes()
            and not is_functorch_active()
        ):
            return self._again(known, tensor, dtype)
        if dispatch_modes():
            return self._under_mode(tensor, dtype)
        if tensor.is_leaf and not is_view(tensor):
            is_weight = tensor.requires_grad or isinstance(tensor, Parameter)
            return self._leaf(tensor, dtype) if is_weight else None
        base = base_of(tensor)
        if not isinstance(base, Parameter) or _needs_grad(tensor):
            return None
        if in_forward_mode() or not _holdable(tensor, is_plain(type(tensor))):
            return None
        return self._view(tensor, base, dtype)

    def has(self, leaf: Tensor, dtype: torch.dtype) -> bool:
        """Whether the next use of a leaf in this region casts nothing, as there is a copy."""
        if is_inference_mode_enabled() and not self._inference:
            return self.in_inference_mode.has(leaf, dtype)
        holding = held.holdings.get(id(leaf)) if held.holdings else None
        if holding is not None and not holding.suspended:
            copy = holding.copies.get(dtype)
            if copy is not None and copy.is_of(leaf):
                return not _needs_grad(leaf) or leaf.numel() >= held.WORTH_A_NODE
        entry = self.leaves[dtype].get(id(leaf))
        return entry is not None and entry.cast is not None and entry.is_of(leaf)

    def _held(self, tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
        """The copy that an attachment holds; for this region with a gradient where one is recorded."""
        holding = held.holdings.get(id(tensor))
        if holding is None or dispatch_modes() or is_functorch_active() or in_forward_mode():
            return None
        if holding.suspended:  # it may be written unseen between two uses
            return quiet_cast(tensor, dtype)
        needs_grad = _needs_grad(tensor)
        if needs_grad and tensor.numel() < held.WORTH_A_NODE:
            if holding.copies:
                holding.doubt()  # they are for evaluation, and training may write it unseen
            return None
        loan = held.loan_of(tensor, dtype)
        if loan is None:
            return None
        if not needs_grad:
            self._lend(loan, tensor, dtype, lasts=not holding.ties)
            return loan.tensor
        entry = self.leaves[dtype].get(id(tensor))
        if entry is not None and entry.is_of(tensor) and (cast := entry.cast) is not None:
            return cast
        if holding.grad_dtype is not None and tensor.grad is None:
            tensor.grad_dtype = torch.float32 if in_ddp() else holding.grad_dtype
        cast = with_gradient(tensor, loan.tensor, loan.copy.gradient)
        known = self._known[dtype].get(id(tensor))
        if known is None or not self._fits(known, loan, tensor):
            known = self._entry(tensor, None, dtype)
        self._stand_for(known, loan, cast, lasts=False)
        self._put(known, tensor, dtype)
        return cast

    @staticmethod
    def _fits(known: CachedCast, loan: held.Loan, tensor: Tensor) -> bool:
        return known.requires_grad and known.is_where(tensor) and known.pointer == loan.pointer

    @staticmethod
    def _stand_for(entry: CachedCast, loan: held.Loan, cast: Tensor, *, lasts: bool) -> None:
        """Has an entry stand for a held copy: with what its parameter was when it was copied, not what it is now."""
        entry.pointer = loan.pointer
        entry.renew(cast, loan.version)
        loan.copy.used_by(entry, loan, lasts=lasts)

    def _lend(self, loan: held.Loan, tensor: Tensor, dtype: torch.dtype, *, lasts: bool) -> None:
        """Has a held copy stand for its parameter, until either changes."""
        lasts = lasts and not is_grad_enabled() and not is_captured(tensor) and loan.copy.has_run()
        table = self.lasting if lasts else self.leaves
        entry = table[dtype][id(tensor)] = self._entry(tensor, None, dtype)
        self._stand_for(entry, loan, loan.tensor, lasts=lasts)

    def _again(self, known: CachedCast, tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
        cast, version = known.cast, version_of(tensor)
        if cast is None or known.version != version:
            if self._waits(tensor):
                return None
            cast = _graph_cast(tensor, dtype)
            known.renew(cast, version)  # read before: another thread may write it meanwhile
            self._put(known, tensor, dtype)
        return cast

    def _waits(self, leaf: Tensor) -> bool:
        """Whether a leaf is used for the first time in this region, and PyTorch would keep no copy."""
        key = id(leaf)
        if key in self.used or _held_by_pytorch(leaf):
            return False
        self.used.add(key)
        return True

    def _put(self, entry: CachedCast, tensor: Tensor, dtype: torch.dtype) -> None:
        """Has an entry stand for a leaf; the one from before it was frozen, or thawed, waits for its turn."""
        leaves, key = self.leaves[dtype], id(tensor)
        before = leaves.get(key)
        if before is not None and before is not entry and before.has_numbers_of(tensor):
            entry.other, before.other = before, None
        self._known[dtype][key] = leaves[key] = entry

    def _under_mode(self, tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
        # What needs no gradient is cast at each use, as PyTorch does: it may be what runs when this runs again.
        if not tensor.requires_grad or not tensor.is_leaf or is_view(tensor):
            return None
        if self._modes is None:
            self._modes = weakref.WeakKeyDictionary()
        return self._modes.setdefault(innermost_dispatch_mode(), WeightCache())._leaf(tensor, dtype)

    def _leaf(self, tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
        plain = is_plain(type(tensor))
        key = id(tensor)
        entry = (self.leaves if plain else self._wrapped)[dtype].get(key)
        if entry is not None and entry.is_of(tensor):
            return entry.cast
        if not _holdable(tensor, plain):
            return _once(tensor, dtype)
        other = None if entry is None else entry.other
        if other is not None and other.is_of(tensor):
            self._put(other, tensor, dtype)
            return other.cast
        if plain and self._waits(tensor):
            return None
        entry = self._entry(
            tensor, None, dtype
        )  # before the cast: another thread may write it meanwhile
        cast = entry.cast = _graph_cast(tensor, dtype)
        if type(cast) in (Tensor, type(tensor)):  # else a tracer's, of no use outside of it
            if plain:
                self._put(entry, tensor, dtype)
            else:
                self._wrapped[dtype][key] = entry
        return cast

    def _entry(self, tensor: Tensor, cast: Tensor | None, dtype: torch.dtype) -> CachedCast:
        return CachedCast(tensor, cast, tensor, self._forgetting(dtype, id(tensor)))

    def _forgetting(self, dtype: torch.dtype, key: int) -> Callable[[Any], None]:
        """The callback for a weak reference to a leaf, or to its storage."""
        here = weakref.ref(self)

        def forget(_: Any) -> None:
            cache = here()
            if cache is not None:
                for entries in (cache.leaves, cache.lasting, cache._known, cache._wrapped):
                    entries.get(dtype, {}).pop(key, None)

        return forget

    def _view(self, tensor: Tensor, base: Tensor, dtype: torch.dtype) -> Tensor | None:
        key = id(base)
        views = self._views.get(key)
        if views is None:
            views = self._views[key] = Views(base, self._views.forgetting(key))
        copies = views.copies
        geometry = (tensor.storage_offset(), tensor.shape, tensor.stride(), dtype)
        entry = copies.get(geometry)
        if entry is None:
            views.make_room(tensor.numel(), 2 * base.numel())
        if entry is None or not entry.is_of(tensor):
            entry = CachedCast(tensor, None, base, copies.forgetting(geometry))
            entry.cast = _plain_cast(tensor, dtype)
            copies[geometry] = entry
        return entry.cast


def _held_by_pytorch(leaf: Tensor) -> bool:
    return leaf.requires_grad and not is_inference_mode_enabled()


def _needs_grad(tensor: Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def _holdable(tensor: Tensor, plain: bool) -> bool:
    # Under a functorch transform tensors are wrappers of one call; a view with the bit that says "negated" has the
    # geometry of the one without; a wrapper that cannot be flattened is a tracer's.
    return (
        tensor.layout is torch.strided
        and counts_versions(tensor)
        and not tensor.is_neg()
        and not is_functorch_active()
        and (plain or hasattr(type(tensor), "__tensor_flatten__"))
    )


def _once(tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
    """A copy for this call; None for a functorch wrapper, which PyTorch holds for as long as its transform runs."""
    if not tensor.requires_grad or is_functorch_wrapper(tensor):
        return None
    return quiet_cast(tensor, dtype)


def _graph_cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if is_grad_enabled() or is_inference_mode_enabled():
        return quiet_cast(tensor, dtype)
    with outside_inference_mode():
        return quiet_cast(tensor, dtype)


def _plain_cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return quiet_cast(tensor, dtype)
