"""What a scaler's steps did: the latest of each optimizer, a bounded history, counters.

Invariants:
- writing down a step waits for no device. An iteration whose verdict is on the device is *open*; it
  is closed, in order, when its verdict has arrived, or when somebody asks for the counters;
- an iteration is closed once, and what it says is final.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from precast import _torch
from precast._internal.events import StepEvent

__all__ = ["Counters", "Iteration", "Later", "Ledger"]


@dataclass(frozen=True, slots=True)
class Counters:
    """How often something happened since the scaler was made; states do not hold it."""

    steps: int = 0
    """Calls of `step`, the skipped ones too."""
    skipped: int = 0
    """Steps that were skipped."""
    consecutive_skips: int = 0
    """Iterations in a row, up to the latest, in which a step was skipped."""
    growths: int = 0
    """Times the scale was raised, or would have been but for `max_scale`."""
    backoffs: int = 0
    """Times the scale was lowered, or would have been but for `min_scale`."""


class Later:
    """A number that a device is still computing, on its way to where it can be read without waiting."""

    __slots__ = ("_arrived", "_host")

    def __init__(self, number: Tensor) -> None:
        self._host, self._arrived = _torch.copy_to_host_async(number)

    def is_here(self) -> bool:
        """Whether `read` would not wait."""
        return self._arrived is None or bool(self._arrived.query())

    def read(self) -> float:
        """The number; waits until it is here."""
        if self._arrived is not None:
            self._arrived.synchronize()
        value: Any = self._host.tolist()  # memory of the CPU, read without an operation
        return float(value)


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration as `update` ends it."""

    number: int
    scale: Tensor
    skipped: bool | Later
    events: tuple[StepEvent, ...]
    interval: int
    """Good iterations until the scale grows; 0 where the scale was set by hand."""

    def was_skipped(self) -> bool:
        """Whether a step was skipped; waits for a verdict that is not here."""
        return self.skipped if isinstance(self.skipped, bool) else bool(self.skipped.read())


class Ledger:
    """All that is remembered of a scaler's steps.

    Args:
        length: How many steps the history keeps.
        counters: Those of a scaler that this one goes on for.
        good: The same of good iterations in a row.
        floor: A scale below this one counts as this one.
    """

    def __init__(
        self, length: int, counters: Counters | None = None, good: int = 0, *, floor: float = 0.0
    ) -> None:
        self.history: deque[StepEvent] = deque(maxlen=length)
        self.counters = counters or Counters()
        self.bad_losses = 0
        """Skipped iterations in a row, up to the latest closed one, whose loss was not finite."""
        self.stuck = 0
        """Skipped iterations in a row, up to the latest closed one, whose scale was as high as the first of these."""
        self._lowest = math.inf
        self._floor = floor
        self.good = good
        """Good iterations in a row since the scale changed, as the growth tracker counts them."""
        self._latest = WeakIdKeyDictionary()  # not by what they equal: some are unhashable
        self._open: deque[Iteration] = deque()
        self._now: list[StepEvent] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has the length and the counters, and nothing open."""
        return Ledger, (self.history.maxlen, self.counters, self.good)

    def write(self, optimizer: Optimizer, event: StepEvent) -> None:
        """Notes a step of the iteration that runs."""
        self.history.append(event)
        self._latest[optimizer] = event
        self._now.append(event)

    def latest(self, optimizer: Optimizer) -> StepEvent | None:
        """The latest step of an optimizer."""
        event: StepEvent | None = self._latest.get(optimizer)
        return event

    def resume(self, good: int) -> None:
        """A state was loaded: what runs of iterations there were ends with what came before."""
        for _ in self.closed(wait=True):
            pass
        self.good, self.bad_losses = good, 0
        self.stuck, self._lowest = 0, math.inf
        self.counters = replace(self.counters, consecutive_skips=0)

    def end_iteration(
        self, number: int, scale: Tensor, skipped: bool | Tensor, interval: int
    ) -> None:
        """The iteration is over: `skipped` if its verdict is known, else the tensor that will be."""
        known = skipped if isinstance(skipped, bool) else Later(skipped)
        self._open.append(Iteration(number, scale, known, tuple(self._now), interval))
        self._now = []

    def drop_iteration(self) -> None:
        """The iteration says nothing: it checked no gradients, or was written into a CUDA graph."""
        self._now = []

    def closed(self, wait: bool = False) -> Iterator[Iteration]:
        """Closes open iterations, the oldest first: those whose verdict is here, or all."""
        while self._open:
            skipped = self._open[0].skipped
            if not (wait or isinstance(skipped, bool) or skipped.is_here()):
                return
            iteration = self._open.popleft()
            self._count(iteration)
            yield iteration

    def _count(self, iteration: Iteration) -> None:
        before, events = self.counters, iteration.events
        skipped = iteration.was_skipped()
        grown = False
        if iteration.interval:
            self.good = 0 if skipped else self.good + 1
            grown = self.good >= iteration.interval
            self.good %= iteration.interval
        self.counters = Counters(
            before.steps + len(events),
            before.skipped + (sum(bool(event.skipped) for event in events) if skipped else 0),
            before.consecutive_skips + 1 if skipped else 0,
            before.growths + grown,
            before.backoffs + (skipped and iteration.interval > 0),
        )
        bad_loss = skipped and not all(event.loss_finite for event in events)
        self.bad_losses = self.bad_losses + 1 if bad_loss else 0
        self._note_scale(float(iteration.scale) if skipped else math.inf)

    def _note_scale(self, scale: float) -> None:
        """Counts how long the scale has not fallen; infinity ends the count."""
        scale = max(scale, self._floor)
        fell = scale < self._lowest or scale == math.inf
        self.stuck = int(scale < math.inf) if fell else self.stuck + 1
        self._lowest = scale if scale == math.inf else min(scale, self._lowest)
