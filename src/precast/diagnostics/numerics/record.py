"""What is noted of one training step: the extremes of each tensor in the order of time, and, if asked for, its counts.

Invariants:
- noting waits for no device, and holds no tensor of the program's but weakly: of each there are two numbers;
- a tensor that several modules hand on, or take, is noted once;
- a step's notes are bounded: what comes after `MOST` is counted, and not looked at.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from precast import _torch
from precast._internal import pytree
from precast._internal.events import NonfiniteOrigin
from precast.diagnostics.numerics.tally import NARROW, Counts, Tally, countable

__all__ = ["MOST", "Extremes", "Record", "Slot", "Step", "read", "tensors_in"]

MOST: Final = 20_000

Extremes = tuple[float, float]
"""The smallest and the largest number of a tensor; both NaN where one is."""


class Slot(NamedTuple):
    """A tensor that was noted."""

    kind: str
    """ "output", "input" or "gradient"."""
    name: str
    """Of the module whose it is."""
    dtype: str
    inputs: tuple[int, ...]
    """Of an output: the places of the slots that it was made from; of an input that was written since a module gave it,
    the place of that output."""
    call: int = 1
    """Which call of the module in the step it was."""


class Missed(NamedTuple):
    """What was written in place before it was looked at, so that nobody knows what was in it before."""

    kind: str
    """ "output" or "input"."""
    name: str
    """Of the module."""
    place: int
    """How many slots there were before it."""
    seen: int | None
    """The place at which the tensor was looked at afterwards, if it was."""


class _Part(NamedTuple):
    """What was noted on one device in one dtype."""

    dtype: str
    noted: list[tuple[int, tuple[Tensor, Tensor]]]
    """Places, and the extremes there."""


_Known = tuple[weakref.ref[Tensor], int, int]
"""A tensor that was noted, its version then, and the place of its slot."""


@dataclass(eq=False)
class Step:
    """A step that is over; its extremes may still be on the device."""

    number: int
    slots: tuple[Slot, ...]
    parts: list[tuple[list[int], Tensor]]
    """Places of slots, and the extremes of these, low and high in turns."""
    scale: Tensor | float | None
    skipped: bool | Tensor | None
    first: NonfiniteOrigin | None
    names: tuple[str, ...]
    """Parameters whose gradients were not finite, where a scaler has skipped the step."""
    seconds: float
    dropped: int
    missed: tuple[Missed, ...] = ()

    @property
    def loss_scale(self) -> float | None:
        """The scale as a number; waits for the device."""
        return None if self.scale is None else float(self.scale)


@dataclass(eq=False)
class Record:
    """The step that runs."""

    number: int
    begun: float
    tallies: dict[tuple[str, str], Tally] | None
    """Kind and name of each tensor -> its counts, in a step in which they are asked for."""
    slots: list[Slot] = field(default_factory=list)
    scale: Tensor | float | None = None
    skipped: bool | Tensor | None = None
    first: NonfiniteOrigin | None = None
    names: tuple[str, ...] = ()
    dropped: int = 0
    scaled: set[tuple[str, str]] = field(default_factory=set)
    """Parameters whose gradients were counted with the loss's scale on them."""
    without_gradient: Counter[str] = field(default_factory=Counter)
    """Modules that ran in a checkpoint without a graph: their gradients come when it runs again."""
    calls: Counter[str] = field(default_factory=Counter)
    """Modules, and how often they were called."""
    told: int | None = None
    """The number that a scaler, or a run, gives the step."""
    _missed: list[tuple[weakref.ref[Tensor], Missed]] = field(default_factory=list)
    _parts: dict[tuple[torch.device, torch.dtype], _Part] = field(default_factory=dict)
    _known: dict[int, _Known] = field(default_factory=dict)

    def number_told(self, number: int) -> None:
        """Somebody else, a scaler or a run, gives the step a number: so do we."""
        self.told = self.number = number
        self.first = self.first and self.first.numbered(number)

    def note(
        self, kind: str, name: str, tensor: Tensor, inputs: tuple[int, ...] = (), call: int = 1
    ) -> Tensor | None:
        """Notes a tensor, where no graph is made; what was looked at of it, None where nothing was."""
        memory = countable(tensor)
        if memory is None or not memory.numel() or (memory.is_cuda and _torch.is_captured(memory)):
            return None
        place = len(self.slots)
        if place >= MOST:
            self.dropped += 1
            return None
        low, high = torch.aminmax(memory if memory.dtype not in NARROW else memory.float())
        part = self._part(memory.device, memory.dtype)
        # A signal may have the step closed anywhere: each statement leaves it whole.
        self.slots.append(Slot(kind, name, part.dtype, inputs, call))
        part.noted.append((place, (low, high)))
        if kind != "gradient":
            self._found(tensor, place)
            self._known[id(tensor)] = weakref.ref(tensor), _version(tensor), place
        return memory

    def _part(self, device: torch.device, dtype: torch.dtype) -> _Part:
        part = self._parts.get((device, dtype))
        if part is None:
            part = self._parts[device, dtype] = _Part(str(dtype).removeprefix("torch."), [])
        return part

    def place_of(self, tensor: Tensor, *, unchanged: bool = True) -> int | None:
        """The place of a tensor that was noted; where `unchanged`, only if it was not written since."""
        known = self._known.get(id(tensor))
        if known is None:
            return None
        noted, version, place = known
        if noted() is not tensor or (unchanged and version != _version(tensor)):
            return None
        return place

    def miss(self, kind: str, name: str, tensor: Tensor) -> None:
        """A tensor was written in place before it was looked at."""
        if len(self._missed) < MOST and all(ref() is not tensor for ref, _ in self._missed):
            missed = Missed(kind, name, len(self.slots), None)
            self._missed.append((weakref.ref(tensor), missed))

    def _found(self, tensor: Tensor, place: int) -> None:
        for k, (ref, missed) in enumerate(self._missed):
            if missed.seen is None and ref() is tensor:
                self._missed[k] = ref, Missed(missed.kind, missed.name, missed.place, place)

    def tally(self, kind: str, name: str) -> Tally:
        """The counts of a tensor."""
        assert self.tallies is not None
        return self.tallies.setdefault((kind, name), Tally())

    def counts(self) -> dict[tuple[str, str], Counts]:
        """What the tallies say, gradients without the loss's scale; waits for the device."""
        scale = 1.0 if self.scale is None else float(self.scale)
        power = -round(math.log2(scale)) if scale > 0 else 0
        found = {}
        for key, tally in (self.tallies or {}).items():
            tally.power = power if key[0] == "gradient" or key in self.scaled else 0
            found[key] = tally.read()
        return found

    def close(self, seconds: float) -> Step:
        """What stays of the step."""
        noted = [part.noted for part in self._parts.values() if part.noted]
        parts = [
            ([place for place, _ in one], torch.stack([n for _, both in one for n in both]))
            for one in noted
        ]
        return Step(
            self.number,
            tuple(self.slots),
            parts,
            self.scale,
            self.skipped,
            self.first,
            self.names,
            seconds,
            self.dropped,
            tuple(missed for _, missed in self._missed),
        )


def read(steps: Iterable[Step]) -> list[list[Extremes]]:
    """The extremes of each slot of each step; waits for the device, once for each device and dtype."""
    steps = list(steps)
    groups: dict[Any, list[tuple[int, list[int], Tensor]]] = defaultdict(list)
    for number, step in enumerate(steps):
        for places, numbers in step.parts:
            groups[numbers.device, numbers.dtype].append((number, places, numbers))
    found: list[list[Extremes]] = [[(0.0, 0.0)] * len(step.slots) for step in steps]
    for group in groups.values():
        values = iter(torch.cat([numbers for _, _, numbers in group]).tolist())
        for number, places, _ in group:
            for place in places:
                found[number][place] = (next(values), next(values))
    return found


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a module's arguments or output, in any nesting."""
    if type(value) is Tensor:
        return [value]
    if type(value) is tuple and len(value) == 1 and type(value[0]) is Tensor:
        return [value[0]]
    return pytree.tensors_in(value)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else _torch.version_of(tensor)
