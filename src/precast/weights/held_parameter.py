"""What is held of one parameter: its copies, its optimizer, and which other parameters lie in the same memory.

Invariants:

- a parameter is held weakly; its copies are by dtype;
- parameters whose memory overlaps know each other: what writes one writes the others, and moves one counter.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from precast._torch import is_plain
from precast.weights.held_copy import Copy, unless_python_ends

__all__ = ["Holding", "Place", "guarded", "holdings", "lying_in"]


class Place(NamedTuple):
    """Where a tensor lies: its storage, and the addresses from its first number to behind its last one."""

    storage: int
    start: int
    end: int

    @classmethod
    def of(cls, tensor: Tensor) -> Place:
        """That of a tensor with numbers in memory."""
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        span = 1 + sum((size - 1) * step for size, step in steps) if tensor.numel() else 0
        start = tensor.data_ptr()
        return cls(tensor.untyped_storage().data_ptr(), start, start + span * tensor.element_size())

    def overlaps(self, other: Place) -> bool:
        """Whether a number may be in both."""
        return self.start < other.end and other.start < self.end


class Holding:
    """What is held of one parameter: its name for messages, its copies by dtype, and how many attachments hold it."""

    __slots__ = (
        "__weakref__",
        "attachments",
        "copies",
        "grad_dtype",
        "name",
        "optimizer",
        "parameter",
        "place",
        "spoiled",
        "suspended",
        "threads",
        "ties",
    )

    def __init__(self, name: str, parameter: Parameter, forget: Callable[[int], None]) -> None:
        key = id(parameter)
        self.name = name
        self.parameter = weakref.ref(parameter, unless_python_ends(lambda _: forget(key)))
        self.copies: Mapping[torch.dtype, Copy] = {}
        """By dtype; exchanged and never changed, so that another thread may go through it meanwhile."""
        self.attachments = 0
        self.grad_dtype: torch.dtype | None = None
        """The dtype in which gradients stay until the optimizer's step; None for float32."""
        self.spoiled = False
        """Whether a write was found that no version counter saw, at the end of a region that could not raise."""
        self.suspended = 0
        """How many blocks of `Attachment.writing` are open."""
        self.threads: set[int] = set()
        """The threads that have used a copy, by their `ident`."""
        self.optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        """The optimizer of PyTorch's kind that steps it, whose steps are listened to; None while none has."""
        self.place: Place | None = None
        """Where the parameter lay when a copy of it was written."""
        self.ties: tuple[Holding, ...] = ()
        """The others whose parameters lie there too."""

    def new_copy(self, parameter: Tensor, dtype: torch.dtype) -> Copy:
        """A copy that has yet to be written, in place of the one in that dtype, if there is one."""
        if dtype in self.copies:
            self.copies[dtype].end()
        copy = Copy(parameter, dtype)
        self.copies = {**self.copies, dtype: copy}
        return copy

    def drop_unfit(self) -> None:
        """Forgets copies that the parameter, as it is now, cannot be copied into."""
        parameter = self.parameter()
        self._keep(lambda copy: parameter is not None and copy.fits(parameter))

    def drop(self) -> None:
        """Forgets all copies."""
        self._keep(lambda _: False)

    def doubt(self, *, at_once: bool = False) -> None:
        """Has the copies, and those of parameters in the same memory, written before they are used again."""
        for holding in (self, *self.ties):
            for copy in holding.copies.values():
                if at_once or copy.version >= 0:  # else that has been said
                    copy.doubt(at_once=at_once)

    def is_stepped(self) -> bool:
        """Whether an optimizer steps it whose steps are listened to; all in its memory, where there are several."""
        return all(
            h.optimizer is not None and h.optimizer() is not None for h in (self, *self.ties)
        )

    def lies_in(self, place: Place | None) -> None:
        """Notes where the parameter lies, and who else lies there; to be asked with the lock."""
        if place == self.place:
            return
        for tie in self.ties:
            tie.ties = tuple(other for other in tie.ties if other is not self)
        if self.place is not None:
            _by_storage[self.place.storage].remove(self)
            if not _by_storage[self.place.storage]:
                del _by_storage[self.place.storage]
        self.place, self.ties = place, ()
        if place is None:
            return
        there = _by_storage[place.storage]
        self.ties = tuple(h for h in there if h.place is not None and h.place.overlaps(place))
        there.append(self)
        for tie in self.ties:
            tie.ties = (*tie.ties, self)
            for copy in tie.copies.values():
                copy.doubt()  # what stands for it looks at one version counter alone

    def _keep(self, wanted: Callable[[Copy], bool]) -> None:
        before, self.copies = self.copies, {d: c for d, c in self.copies.items() if wanted(c)}
        for dtype in before.keys() - self.copies.keys():
            before[dtype].end()


holdings: Final[dict[int, Holding]] = {}
"""``id(parameter)`` -> what is held of it; the hot path of a kernel asks whether a key is here."""

guarded: Final[list[Holding]] = []
"""Those whose copies are compared in turns; empty where nothing is to be looked for."""


_by_storage: Final[defaultdict[int, list[Holding]]] = defaultdict(list)
"""The holdings that have a place, by the address of its storage."""


def lying_in(tensor: Tensor) -> Iterator[Holding]:
    """Those whose parameters lie where a tensor lies, that parameter's own too; to be asked with the lock."""
    if is_plain(type(tensor)) and tensor.layout is torch.strided and _by_storage:
        place = Place.of(tensor)
        for holding in list(_by_storage.get(place.storage, ())):
            if holding.place is not None and holding.place.overlaps(place):
                yield holding
