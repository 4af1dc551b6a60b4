"""The record of one training step: the extremes of each tensor in order of time and, in counted steps, its histogram.

Invariants:

- recording does not wait for the device, and stores two values and a weak reference for each tensor;
- a tensor that several modules return or receive is recorded once;
- a record is bounded: tensors after the first `_MOST` are not recorded.
"""

from __future__ import annotations

import math
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from precast import _torch
from precast._internal.display import dtype_name
from precast._internal.events import NonfiniteOrigin
from precast.diagnostics.numerics.host_transfer import move_to_host
from precast.diagnostics.numerics.lost_updates import UNKNOWN, Averages, LostUpdates
from precast.diagnostics.numerics.tally import (
    TensorCounts,
    TensorKey,
    TensorTally,
    comparable,
    countable,
)

__all__ = ["Extremes", "StepRecord", "TensorSlot", "is_finite", "read"]

_MOST: Final = 20_000

Extremes = tuple[float, float]
"""The smallest and the largest value of a tensor; both NaN if one is."""


class TensorSlot(NamedTuple):
    """A recorded tensor."""

    kind: str
    """ "output", "input" or "gradient"."""
    name: str
    """The module that returned or received it."""
    dtype: str
    inputs: tuple[int, ...]
    """For an output: the places of the module's inputs. For an input that was written after a module returned it: the
    place of that output."""

    @property
    def key(self) -> TensorKey:
        """Kind and name."""
        return self.kind, self.name


@dataclass(slots=True)
class MissedTensor:
    """A tensor that was written in place before it was examined, so that its earlier values are unknown."""

    tensor: weakref.ref[Tensor]
    name: str
    """The module that returned or received it."""
    place: int
    """The number of slots before it."""
    later_place: int | None = None
    """The place at which the tensor was recorded afterwards, if it was."""


class StepRecord:
    """A current or finished step; its values may still be on the device. With `counts`, all values are counted."""

    def __init__(self, number: int, *, counts: bool) -> None:
        self.number = number
        self.assigned_number: int | None = None
        """The step number of a scaler or of a run."""
        self.tallies: dict[TensorKey, TensorTally] | None = {} if counts else None
        """The counts of each tensor; None if the step is not counted."""
        self._start = time.perf_counter()
        self.seconds = 0.0
        """The time until the latest call of `pack`."""
        self.slots: list[TensorSlot] = []
        self.extremes: list[Extremes] = []
        """The extremes of each slot, after `read`."""
        self.parts: dict[tuple[int, ...], Tensor] = {}
        """Maps places of slots to their extremes, low and high in turns."""
        self.scale: Tensor | float | None = None
        self.skipped: bool | Tensor | None = None
        self.first: NonfiniteOrigin | None = None
        self.names: tuple[str, ...] = ()
        """Parameters whose gradients were not finite, if a scaler has skipped the step."""
        self.without_gradient = Counter[str]()
        """Calls of modules in a checkpoint without a graph, whose gradients come when it repeats them."""
        self.missed: list[MissedTensor] = []
        self.lost_updates = LostUpdates()
        self.averages = Averages()
        self._unpacked = defaultdict[Any, list[tuple[int, Tensor, Tensor]]](list)
        """Places and extremes that are not in `parts` yet, by device and dtype."""
        self._places: dict[int, tuple[weakref.ref[Tensor], int | None, int]] = {}
        """Maps the id of a recorded tensor to the tensor, its version, and the place of its slot."""

    @property
    def loss_scale(self) -> float | None:
        """The scale as a number. Waits for the device."""
        return None if self.scale is None else float(self.scale)

    @property
    def has_outputs(self) -> bool:
        """True if a module has returned a tensor."""
        return any(slot.kind == "output" for slot in self.slots)

    def set_number(self, number: int) -> None:
        """Use the step number of a scaler or of a run."""
        self.assigned_number = self.number = number
        self.first = self.first and self.first.with_step(number)

    def note(
        self, kind: str, name: str, tensor: Tensor, inputs: tuple[int, ...] = ()
    ) -> Tensor | None:
        """Record a tensor, with gradients disabled; return its memory, or None if it is not recorded."""
        memory = countable(tensor)
        if memory is None or not memory.numel() or _torch.is_captured(memory):
            return None
        place = len(self.slots)
        if place >= _MOST:
            return None
        low, high = torch.aminmax(comparable(memory))
        entries = self._unpacked[memory.device, memory.dtype]
        # A signal handler may end the step anywhere: each statement leaves it consistent.
        self.slots.append(TensorSlot(kind, name, dtype_name(memory.dtype), inputs))
        entries.append((place, low, high))
        if kind != "gradient":
            for missed in self.missed:
                if missed.later_place is None and missed.tensor() is tensor:
                    missed.later_place = place
            self._places[id(tensor)] = weakref.ref(tensor), _torch.version_if_counted(tensor), place
        return memory

    def place_of(self, tensor: Tensor, *, unchanged: bool = True) -> int | None:
        """Return the place of a recorded tensor; with `unchanged`, only if it was not written since."""
        entry = self._places.get(id(tensor))
        if entry is None or entry[0]() is not tensor:
            return None
        _, version, place = entry
        return None if unchanged and version != _torch.version_if_counted(tensor) else place

    def miss(self, name: str, tensor: Tensor) -> None:
        """Record a tensor that was written in place before it was examined."""
        if len(self.missed) < _MOST and all(each.tensor() is not tensor for each in self.missed):
            self.missed.append(MissedTensor(weakref.ref(tensor), name, len(self.slots)))

    def tally(self, key: TensorKey, *, scaled: bool = False) -> TensorTally:
        """Return the counts of a tensor in a counted step; those of a gradient are `scaled`."""
        assert self.tallies is not None
        return self.tallies.setdefault(key, TensorTally(scaled=scaled))

    def values(self) -> tuple[dict[Any, Any], ...]:
        """Return dictionaries with the other values of a packed record, for `move_to_host`."""
        return self.parts, vars(self)

    def count_values(self) -> Iterator[dict[Any, Any]]:
        """Yield dictionaries with the values of `counts`, for `move_to_host`. Nothing is counted after that."""
        yield from (tally.sums for tally in (self.tallies or {}).values())
        yield from (self.lost_updates.sums, self.averages.sums)

    def counts(self) -> dict[TensorKey, TensorCounts]:
        """Return the counts of all tensors, of gradients without the loss scale. Waits for the device."""
        scale = self.loss_scale or 1.0
        power = -round(math.log2(scale)) if scale > 0 else 0
        updates, averages = self.lost_updates.read(), self.averages.read()
        counts = {}
        for (kind, name), tally in (self.tallies or {}).items():
            counts[kind, name] = read = tally.read(power if tally.scaled else 0)
            if kind == "parameter":
                read.figures.update(updates.get(name, UNKNOWN))
                read.figures["average_rounded_away"] = averages.get(name)
        return counts

    def pack(self) -> StepRecord:
        """Combine the many recorded values into few tensors; return the record itself."""
        self.seconds = time.perf_counter() - self._start
        for entries in filter(None, [*self._unpacked.values()]):
            extremes = torch.stack([number for each in entries for number in each[1:]])
            self.parts[tuple(each[0] for each in entries)] = extremes
            entries.clear()
        return self

    def end(self) -> StepRecord:
        """Pack the record, and drop its references to tensors."""
        self._places.clear()
        return self.pack()


def read(steps: Iterable[StepRecord]) -> None:
    """Fill in the extremes of packed steps. Waits once for each device."""
    steps = list(steps)
    move_to_host(group for step in steps for group in step.values())
    for step in steps:
        step.extremes = [(0.0, 0.0)] * len(step.slots)
        for places, numbers in step.parts.items():
            values = iter(numbers.tolist())
            for place in places:
                step.extremes[place] = (next(values), next(values))


def is_finite(extremes: Extremes) -> bool:
    """Return True if all values of a tensor are finite."""
    return math.isfinite(extremes[0]) and math.isfinite(extremes[1])
