"""A held parameter: its copies, its optimizer, and the other held parameters in the same memory.

Invariants:

- a parameter is referenced weakly; it has at most one copy per 16-bit dtype and per `Scaling`;
- parameters with overlapping memory reference each other: a write to one changes the others, but moves one counter.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from precast._torch import impl_address, is_plain
from precast.weights.float8.formats import Scaling
from precast.weights.held_copy import Copy, unless_finalizing
from precast.weights.held_float8 import QuantisedCopy
from precast.weights.native.api import native_engine

__all__ = [
    "CopyKey",
    "HeldParameter",
    "MemoryRange",
    "comparison_queue",
    "held_parameters",
    "held_parameters_overlapping",
]


CopyKey = torch.dtype | Scaling
"""Identifies a copy of a parameter: the 16-bit dtype, or the scaling in 8 bits."""


class MemoryRange(NamedTuple):
    """The storage of a tensor, with the addresses of its first element and of the end of its last one."""

    storage: int
    start: int
    end: int

    @classmethod
    def of(cls, tensor: Tensor) -> MemoryRange:
        """Return the memory range of a plain tensor."""
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        span = 1 + sum((size - 1) * step for size, step in steps) if tensor.numel() else 0
        start = tensor.data_ptr()
        return cls(tensor.untyped_storage().data_ptr(), start, start + span * tensor.element_size())

    def overlaps(self, other: MemoryRange) -> bool:
        """Return True if the ranges share an address."""
        return self.start < other.end and other.start < self.end


class HeldParameter:
    """A parameter that attachments hold: its copies, its name for messages, and the number of attachments."""

    __slots__ = (
        "__weakref__",
        "attachments",
        "copies",
        "is_cast_per_region",
        "memory_range",
        "name",
        "optimizer",
        "overlapping",
        "parameter",
        "source",
        "stale",
        "suspended",
        "threads",
    )

    def __init__(self, name: str, parameter: Parameter, forget: Callable[[int], None]) -> None:
        key = id(parameter)
        self.name = name
        self.source = impl_address(parameter)
        """The address of the parameter's TensorImpl, which identifies it in compiled kernels; 0 when no longer held."""
        self.parameter = weakref.ref(parameter, unless_finalizing(lambda _: forget(key)))
        self.copies: Mapping[CopyKey, Copy] = {}
        """By `CopyKey`. Replaced and never changed, so that another thread may iterate over it."""
        self.attachments = 0
        self.stale = False
        """True after an unversioned write was detected at a place that could not raise the error."""
        self.is_cast_per_region = False
        """The last argument of `set_cast_per_region`."""
        self.suspended = 0
        """The number of open `Attachment.writing` blocks."""
        self.threads: set[int] = set()
        """The `ident` of each thread that has used a copy."""
        self.optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        """The last optimizer whose step on this parameter was observed."""
        self.memory_range: MemoryRange | None = None
        """The parameter's memory when a copy was last written."""
        self.overlapping: tuple[HeldParameter, ...] = ()
        """The other held parameters in the same memory."""

    def new_copy(self, parameter: Tensor, key: CopyKey) -> Copy:
        """Add a copy that has yet to be written, in place of the one with that key, if any."""
        if key in self.copies:
            self.copies[key].evict()
        self.take_back()
        for other in self.copies.values():
            other.invalidate()  # kernels no longer use it without Python, see `WeightCache`
        copy = (
            Copy(parameter, key) if isinstance(key, torch.dtype) else QuantisedCopy(parameter, key)
        )
        self.copies = {**self.copies, key: copy}
        return copy

    def drop(self) -> None:
        """Drop all copies."""
        before, self.copies = self.copies, {}
        for copy in before.values():
            copy.evict()

    def invalidate(self, *, at_once: bool = False) -> None:
        """Make the next use rewrite the copies, and those of parameters in the same memory."""
        for held_parameter in (self, *self.overlapping):
            for copy in held_parameter.copies.values():
                if at_once or copy.version >= 0:  # otherwise it is invalid already
                    copy.invalidate(at_once=at_once)

    def invalidate_after_step(self) -> None:
        """Make the next use rewrite the copies, and those of parameters in the same memory, after an optimizer step."""
        for held_parameter in (self, *self.overlapping):
            for copy in held_parameter.copies.values():
                copy.invalidate_after_step()

    def take_back(self) -> None:
        """End the lending of its copies to kernels, and of those of parameters in the same memory."""
        for held_parameter in (self, *self.overlapping):
            for copy in held_parameter.copies.values():
                copy.take_back()
            held_parameter.set_cast_per_region(False)

    def set_cast_per_region(self, is_cast_per_region: bool) -> None:
        """Set whether kernels cast it once per region where its gradient is recorded, as if it were not held."""
        if native_engine.api is not None and self.is_cast_per_region is not is_cast_per_region:
            native_engine.api.set_cast_per_region(self.source, is_cast_per_region)
            self.is_cast_per_region = is_cast_per_region

    def has_observed_optimizer(self) -> bool:
        """Return True if an observed optimizer steps this parameter and all others in its memory."""
        return all(
            h.optimizer is not None and h.optimizer() is not None for h in (self, *self.overlapping)
        )

    def set_memory_range(self, place: MemoryRange | None) -> None:
        """Set the parameter's memory, and find the other held parameters there. Needs the lock."""
        if place == self.memory_range:
            return
        for other in self.overlapping:
            other.overlapping = tuple(h for h in other.overlapping if h is not self)
        if self.memory_range is not None:
            _by_storage[self.memory_range.storage].remove(self)
            if not _by_storage[self.memory_range.storage]:
                del _by_storage[self.memory_range.storage]
        self.take_back()
        self.memory_range, self.overlapping = place, ()
        if place is None:
            return
        neighbours = _by_storage[place.storage]
        self.overlapping = tuple(
            h for h in neighbours if h.memory_range is not None and h.memory_range.overlaps(place)
        )
        neighbours.append(self)
        for other in self.overlapping:
            other.overlapping = (*other.overlapping, self)
            for copy in other.copies.values():
                copy.invalidate()  # cache entries compare one version counter only


held_parameters: Final[dict[int, HeldParameter]] = {}
"""``id(parameter)`` -> its `HeldParameter`; kernels look up each weight here."""

comparison_queue: Final[list[HeldParameter]] = []
"""The parameters whose copies are compared in turn with their values, to find unversioned writes."""


_by_storage: Final[defaultdict[int, list[HeldParameter]]] = defaultdict(list)
"""The held parameters with a memory range, by the address of the storage."""


def held_parameters_overlapping(tensor: Tensor) -> Iterator[HeldParameter]:
    """Yield the held parameters whose memory overlaps that of a tensor, its own included. Needs the lock."""
    if not (_by_storage and is_plain(type(tensor)) and tensor.layout is torch.strided):
        return
    neighbours = _by_storage.get(tensor.untyped_storage().data_ptr())
    if neighbours:
        place = MemoryRange.of(tensor)
        for held_parameter in list(neighbours):
            memory = held_parameter.memory_range
            if memory is not None and memory.overlaps(place):
                yield held_parameter
