"""What is noted of one training step: the extremes of each tensor in the order of time, and, if asked for, its counts.

Invariants:
- noting waits for no device, and keeps only weak references to the program's tensors: of each there are two numbers;
- a tensor that several modules hand on, or take, is noted once;
- a step's notes are bounded: tensors after the first `_MOST` are not looked at.
"""

from __future__ import annotations

import math
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from precast import _torch
from precast._internal import events, pytree
from precast._internal.display import dtype_name
from precast._internal.events import NonfiniteOrigin
from precast.diagnostics.numerics.averages import Averages
from precast.diagnostics.numerics.lost_updates import LostUpdates
from precast.diagnostics.numerics.tally import NARROW, Counts, Key, Tally, countable

__all__ = ["Extremes", "Numbering", "Record", "Slot", "is_finite", "read", "tensors_in"]

_MOST: Final = 20_000

Extremes = tuple[float, float]
"""The smallest and the largest number of a tensor; both NaN where one is."""


class Slot(NamedTuple):
    """A tensor that was noted."""

    kind: str
    """ "output", "input" or "gradient"."""
    name: str
    """The module that gave it or took it."""
    dtype: str
    inputs: tuple[int, ...]
    """For an output: the places of the slots that it was made from. For an input that was written since a module gave
    it: the place of that output."""
    call: int = 1
    """Which call of the module in the step it was."""

    @property
    def key(self) -> Key:
        """Kind and name."""
        return self.kind, self.name


class Missed(NamedTuple):
    """A tensor that was written in place before it was looked at, so that nobody knows what was in it before."""

    name: str
    """The module that gave it or took it."""
    place: int
    """How many slots there were before it."""
    seen: int | None
    """The place at which the tensor was looked at afterwards, if it was."""


@dataclass(eq=False)
class Record:
    """A step, while it runs and when it is over; what is known of it may still be on the device."""

    number: int
    tallies: dict[Key, Tally] | None
    """The counts of each tensor, in a step in which they are asked for."""
    begun: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0
    """How long it took until `pack` was last called."""
    slots: list[Slot] = field(default_factory=list)
    extremes: list[Extremes] = field(default_factory=list)
    """Those of each slot, once `read` has filled them in."""
    parts: list[tuple[list[int], Tensor]] = field(default_factory=list)
    """Places of slots, and the extremes of these, low and high in turns."""
    scale: Tensor | float | None = None
    skipped: bool | Tensor | None = None
    first: NonfiniteOrigin | None = None
    names: tuple[str, ...] = ()
    """Parameters whose gradients were not finite, where a scaler has skipped the step."""
    scaled: set[Key] = field(default_factory=set)
    """Parameters whose gradients were counted with the loss's scale on them."""
    without_gradient: Counter[str] = field(default_factory=Counter)
    """Modules that ran in a checkpoint without a graph: their gradients come when it runs again."""
    calls: Counter[str] = field(default_factory=Counter)
    """Modules, and how often they were called."""
    told: int | None = None
    """The number that a scaler, or a run, gives the step."""
    missed: list[tuple[weakref.ref[Tensor], Missed]] = field(default_factory=list)
    lost_updates: LostUpdates = field(default_factory=LostUpdates)
    averages: Averages = field(default_factory=Averages)
    _noted: defaultdict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor, Tensor]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """What is not in `parts` yet, by device and dtype: places of slots, and the extremes there."""
    _known: dict[int, tuple[weakref.ref[Tensor], int, int]] = field(default_factory=dict)
    """By ``id``: a tensor that was noted, its version then, and the place of its slot."""

    @property
    def loss_scale(self) -> float | None:
        """The scale as a number; waits for the device."""
        return None if self.scale is None else float(self.scale)

    def number_told(self, number: int) -> None:
        """A scaler, or a run, gives the step a number, which becomes ours."""
        self.told = self.number = number
        self.first = self.first and self.first.numbered(number)

    def note(
        self, kind: str, name: str, tensor: Tensor, inputs: tuple[int, ...] = (), call: int = 1
    ) -> Tensor | None:
        """Notes a tensor, where no graph is made; returns what was looked at of it, None where nothing was."""
        memory = countable(tensor)
        if memory is None or not memory.numel() or (memory.is_cuda and _torch.is_captured(memory)):
            return None
        place = len(self.slots)
        if place >= _MOST:
            return None
        low, high = torch.aminmax(memory if memory.dtype not in NARROW else memory.float())
        noted = self._noted[memory.device, memory.dtype]
        # A signal may have the step closed anywhere: each statement leaves it whole.
        self.slots.append(Slot(kind, name, dtype_name(memory.dtype), inputs, call))
        noted.append((place, low, high))
        if kind != "gradient":
            self._found(tensor, place)
            self._known[id(tensor)] = weakref.ref(tensor), _version(tensor), place
        return memory

    def place_of(self, tensor: Tensor, *, unchanged: bool = True) -> int | None:
        """The place of a tensor that was noted; where `unchanged`, only if it was not written since."""
        known = self._known.get(id(tensor))
        if known is None:
            return None
        noted, version, place = known
        if noted() is not tensor or (unchanged and version != _version(tensor)):
            return None
        return place

    def miss(self, name: str, tensor: Tensor) -> None:
        """A tensor that a module gave or took was written in place before it was looked at."""
        if len(self.missed) < _MOST and all(ref() is not tensor for ref, _ in self.missed):
            self.missed.append((weakref.ref(tensor), Missed(name, len(self.slots), None)))

    def _found(self, tensor: Tensor, place: int) -> None:
        for k, (ref, missed) in enumerate(self.missed):
            if missed.seen is None and ref() is tensor:
                self.missed[k] = ref, Missed(missed.name, missed.place, place)

    def tally(self, key: Key) -> Tally:
        """The counts of a tensor, in a step in which they are asked for."""
        assert self.tallies is not None
        return self.tallies.setdefault(key, Tally())

    def counts(self) -> dict[Key, Counts]:
        """The counts of all tensors, gradients without the loss's scale; waits for the device."""
        scale = self.loss_scale or 1.0
        power = -round(math.log2(scale)) if scale > 0 else 0
        counts = {
            key: tally.read(power if key[0] == "gradient" or key in self.scaled else 0)
            for key, tally in (self.tallies or {}).items()
        }
        updates, averages = self.lost_updates.read(), self.averages.read()
        return {
            (kind, name): replace(c, updates=updates.get(name), average=averages.get(name))
            if kind == "parameter"
            else c
            for (kind, name), c in counts.items()
        }

    def pack(self) -> Record:
        """Makes few tensors of the many that were noted; returns the record itself."""
        self.seconds = time.perf_counter() - self.begun
        for noted in filter(None, [*self._noted.values()]):
            extremes = torch.stack([number for each in noted for number in each[1:]])
            self.parts.append(([each[0] for each in noted], extremes))
            noted.clear()
        return self

    def end(self) -> Record:
        """Packs it, and forgets the tensors that it knew."""
        self._known.clear()
        return self.pack()


class Numbering:
    """Numbers the steps of a monitor: what a run, a scaler and a monitor say of one moment has one number.

    A step has the process's number where a step tracker counts, else a scaler's where there is one, else the monitor's
    own. No number is given twice, and later steps have higher ones.
    """

    def __init__(self) -> None:
        self.begun = self.ended = self._next = 0
        """How many steps have begun and ended, and the least number that the next one may have."""

    def new(self) -> int:
        """How many steps had begun before the one that begins now."""
        self.begun += 1
        return self.begun - 1

    def ask(self, record: Record, optimizer: Optimizer | None) -> None:
        """Gives a step the process's number, if a tracker counts; `optimizer` is about to step, None in inference."""
        for tracker in events.step_trackers[:1]:
            number = tracker.number if optimizer is None else tracker.before_step(optimizer)
            record.number_told(number)

    def fix(self, record: Record) -> None:
        """Gives a step the number that it has if it ends now."""
        record.number = self._next if record.told is None else max(record.told, self._next)

    def end(self, record: Record) -> None:
        """A step ends."""
        self.fix(record)
        self._next = record.number + 1
        self.ended += 1


def read(steps: Iterable[Record]) -> None:
    """Fills in the extremes of steps that were packed; waits for the device, once for each device and dtype."""
    groups: dict[Any, list[tuple[Record, list[int], Tensor]]] = defaultdict(list)
    for step in steps:
        step.extremes = [(0.0, 0.0)] * len(step.slots)
        for places, numbers in step.parts:
            groups[numbers.device, numbers.dtype].append((step, places, numbers))
    for group in groups.values():
        values = iter(torch.cat([numbers for _, _, numbers in group]).tolist())
        for step, places, _ in group:
            for place in places:
                step.extremes[place] = (next(values), next(values))


def is_finite(extremes: Extremes) -> bool:
    """Whether all numbers of a tensor are finite."""
    return math.isfinite(extremes[0]) and math.isfinite(extremes[1])


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a module's arguments or output, in any nesting; the usual cases take a short way."""
    if type(value) is Tensor:
        return [value]
    if type(value) is tuple and len(value) == 1 and type(value[0]) is Tensor:
        return [value[0]]
    return pytree.tensors_in(value)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else _torch.version_of(tensor)
