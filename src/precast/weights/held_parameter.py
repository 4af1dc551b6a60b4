"""What is held of one parameter: its copies, its optimizer, and the other parameters in the same memory.

Invariants:

- a parameter is held weakly; it has at most one copy for each 16-bit dtype, and for each way of scaling in 8 bits;
- parameters whose memory overlaps know each other: a write to one changes the others, but moves one counter only.
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
from precast.weights.held_copy import Copy, unless_python_ends
from precast.weights.held_float8 import QuantisedCopy
from precast.weights.native_copies import native

__all__ = [
    "CopyKey",
    "HeldParameter",
    "MemoryRange",
    "compared_in_turn",
    "held_in_memory_of",
    "held_parameters",
]


CopyKey = torch.dtype | Scaling
"""What tells the copies of one parameter apart: the 16-bit dtype, or how it is scaled in 8 bits."""


class MemoryRange(NamedTuple):
    """Where a tensor lies: its storage, and the addresses from its first number to behind its last one."""

    storage: int
    start: int
    end: int

    @classmethod
    def of(cls, tensor: Tensor) -> MemoryRange:
        """That of a tensor with numbers in memory."""
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        span = 1 + sum((size - 1) * step for size, step in steps) if tensor.numel() else 0
        start = tensor.data_ptr()
        return cls(tensor.untyped_storage().data_ptr(), start, start + span * tensor.element_size())

    def overlaps(self, other: MemoryRange) -> bool:
        """Whether a number may be in both."""
        return self.start < other.end and other.start < self.end


class HeldParameter:
    """What is held of one parameter: its name for messages, its copies, and how many attachments hold it."""

    __slots__ = (
        "__weakref__",
        "_alone",
        "attachments",
        "copies",
        "is_left_to_regions",
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
        """The address of the parameter's TensorImpl, by which compiled kernels know it; 0 when it is held no longer."""
        self.parameter = weakref.ref(parameter, unless_python_ends(lambda _: forget(key)))
        self.copies: Mapping[CopyKey, Copy] = {}
        """By dtype, or by how they are scaled in 8 bits; exchanged and never changed, so that another thread may go
        through them meanwhile."""
        self.attachments = 0
        self.stale = False
        """Whether a write was found that no version counter saw, at the end of a region that could not raise."""
        self.is_left_to_regions = False
        """What `leave_to_regions` has said last."""
        self._alone: object = None
        self.suspended = 0
        """How many blocks of `Attachment.writing` are open."""
        self.threads: set[int] = set()
        """The threads that have used a copy, by their `ident`."""
        self.optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        """The optimizer of PyTorch's kind that steps it, whose steps are listened to; None while none has."""
        self.memory_range: MemoryRange | None = None
        """Where the parameter lay when a copy of it was written."""
        self.overlapping: tuple[HeldParameter, ...] = ()
        """The others whose parameters lie there too."""

    def new_copy(self, parameter: Tensor, key: CopyKey) -> Copy:
        """A copy that has yet to be written, in place of the one of that key, if there is one."""
        if key in self.copies:
            self.copies[key].evict()
        self.take_back()
        copy = (
            Copy(parameter, key) if isinstance(key, torch.dtype) else QuantisedCopy(parameter, key)
        )
        self.copies = {**self.copies, key: copy}
        return copy

    def drop_unfit(self) -> None:
        """Forgets copies that the parameter, as it is now, cannot be copied into."""
        parameter = self.parameter()
        self._keep(lambda copy: parameter is not None and copy.fits(parameter))

    def drop(self) -> None:
        """Forgets all copies."""
        self._keep(lambda _: False)

    def invalidate(self, *, at_once: bool = False) -> None:
        """Has the copies, and those of parameters in the same memory, written before they are used again."""
        for held_parameter in (self, *self.overlapping):
            for copy in held_parameter.copies.values():
                if at_once or copy.version >= 0:  # else that has been said
                    copy.invalidate(at_once=at_once)

    def stepped(self) -> None:
        """Has the copies, and those of parameters in the same memory, written before they are used again."""
        for held_parameter in (self, *self.overlapping):
            for copy in held_parameter.copies.values():
                copy.stepped()

    def take_back(self) -> None:
        """Has kernels ask for its copies, and for those of parameters in the same memory, from now on."""
        for held_parameter in (self, *self.overlapping):
            for copy in held_parameter.copies.values():
                copy.take_back()
            held_parameter.leave_to_regions(False)

    def leave_to_regions(self, is_left: bool) -> None:
        """Says whether kernels cast it in each region, as if it were not held, where its gradient is recorded."""
        if native.copies is not None and self.is_left_to_regions is not is_left:
            native.copies.leave_to_regions(self.source, is_left)
            self.is_left_to_regions = is_left

    def is_stepped(self) -> bool:
        """Whether an optimizer steps it whose steps are listened to; all in its memory, where there are several."""
        return all(
            h.optimizer is not None and h.optimizer() is not None for h in (self, *self.overlapping)
        )

    def note_alone(self, parameter: Tensor) -> None:
        """Notes that no copied parameter lies where this one, of which there is no copy, lies now."""
        self._alone = _place_of(parameter)

    def is_alone(self, parameter: Tensor) -> bool:
        """Whether that still holds, as neither it nor a copied parameter has moved since."""
        return self._alone == _place_of(parameter)

    def set_memory_range(self, place: MemoryRange | None) -> None:
        """Notes where the parameter lies, and who else lies there; to be asked with the lock."""
        if place == self.memory_range:
            return
        _Places.changes += 1
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
        there = _by_storage[place.storage]
        self.overlapping = tuple(
            h for h in there if h.memory_range is not None and h.memory_range.overlaps(place)
        )
        there.append(self)
        for other in self.overlapping:
            other.overlapping = (*other.overlapping, self)
            for copy in other.copies.values():
                copy.invalidate()  # what stands for it looks at one version counter alone

    def _keep(self, wanted: Callable[[Copy], bool]) -> None:
        before, self.copies = self.copies, {d: c for d, c in self.copies.items() if wanted(c)}
        for dtype in before.keys() - self.copies.keys():
            before[dtype].evict()


held_parameters: Final[dict[int, HeldParameter]] = {}
"""``id(parameter)`` -> what is held of it; the hot path of a kernel asks whether a key is here."""

compared_in_turn: Final[list[HeldParameter]] = []
"""Those whose copies are compared in turns; empty where nothing is to be looked for."""


class _Places:
    changes = 0
    """How often a place has changed of parameters that were copied."""


def _place_of(parameter: Tensor) -> object:
    return parameter.data_ptr(), parameter.shape, parameter.stride(), _Places.changes


_by_storage: Final[defaultdict[int, list[HeldParameter]]] = defaultdict(list)
"""The held parameters that have a place, by the address of its storage."""


def held_in_memory_of(tensor: Tensor) -> Iterator[HeldParameter]:
    """Those whose parameters lie where a tensor lies, that parameter's own too; to be asked with the lock."""
    if is_plain(type(tensor)) and tensor.layout is torch.strided and _by_storage:
        place = MemoryRange.of(tensor)
        for held_parameter in list(_by_storage.get(place.storage, ())):
            if held_parameter.memory_range is not None and held_parameter.memory_range.overlaps(
                place
            ):
                yield held_parameter
