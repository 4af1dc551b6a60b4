"""What a scaler's steps did: the latest step of each optimizer, a bounded history, and counters.

Invariants:
- adding a step waits for no device. An iteration of which only the device knows whether it was skipped is *open*; it is
  closed, in order, when the device's answer has arrived, or when somebody asks for the counters;
- an iteration is closed once, and what it says then is final.
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

__all__ = ["Counters", "Iteration", "PendingNumber", "StepHistory"]


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


class PendingNumber:
    """A number that a device is still computing, on its way to where it can be read without waiting."""

    __slots__ = ("_arrived", "_host")

    def __init__(self, number: Tensor) -> None:
        self._host, self._arrived = _torch.copy_to_host_async(number)

    def has_arrived(self) -> bool:
        """Whether `read` would not wait."""
        return self._arrived is None or bool(self._arrived.query())

    def read(self) -> float:
        """The number; waits until it has arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        value: Any = self._host.tolist()  # memory of the CPU, read without an operation
        return float(value)


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration of training, as `update` ends it."""

    number: int
    scale: Tensor
    skipped: bool | PendingNumber
    events: tuple[StepEvent, ...]
    interval: int
    """Good iterations until the scale grows; 0 if the scale was set by hand."""

    def was_skipped(self) -> bool:
        """Whether a step was skipped; waits for an answer of the device that has not arrived."""
        return self.skipped if isinstance(self.skipped, bool) else bool(self.skipped.read())


class StepHistory:
    """All that is remembered of a scaler's steps.

    Args:
        length: How many steps are kept.
        counters: Where counting goes on; None is zero.
        good_iterations: The good iterations in a row that came before.
        floor: A scale below this one counts as this one.
    """

    def __init__(
        self,
        length: int,
        counters: Counters | None = None,
        good_iterations: int = 0,
        *,
        floor: float = 0.0,
    ) -> None:
        self.events: deque[StepEvent] = deque(maxlen=length)
        self.counters = counters or Counters()
        self.bad_losses = 0
        """Skipped iterations in a row, up to the latest closed one, whose loss was not finite."""
        self.stuck = 0
        """Skipped iterations in a row, up to the latest closed one, in which the scale has not fallen."""
        self.good_iterations = good_iterations
        """Good iterations in a row since the scale changed, as the growth tracker counts them."""
        self._lowest = math.inf
        self._floor = floor
        self._latest = WeakIdKeyDictionary()  # by identity: some optimizers cannot be hashed
        self._open: deque[Iteration] = deque()
        self._running: list[StepEvent] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, and a pickle, has the length and the counters, and no steps."""
        return StepHistory, (self.events.maxlen, self.counters, self.good_iterations)

    def add(self, optimizer: Optimizer, event: StepEvent) -> None:
        """Adds a step to the iteration that runs."""
        self.events.append(event)
        self._latest[optimizer] = event
        self._running.append(event)

    def latest(self, optimizer: Optimizer) -> StepEvent | None:
        """The latest step of an optimizer."""
        event: StepEvent | None = self._latest.get(optimizer)
        return event

    def resume(self, good_iterations: int) -> None:
        """A state was loaded: iterations from before it and after it do not count as following each other."""
        for _ in self.close(wait=True):
            pass
        self.good_iterations, self.bad_losses = good_iterations, 0
        self.stuck, self._lowest = 0, math.inf
        self.counters = replace(self.counters, consecutive_skips=0)

    def end_iteration(
        self, number: int, scale: Tensor, skipped: bool | Tensor, interval: int
    ) -> None:
        """The iteration that runs is over; `skipped` is a tensor if only the device knows."""
        known = skipped if isinstance(skipped, bool) else PendingNumber(skipped)
        self._open.append(Iteration(number, scale, known, tuple(self._running), interval))
        self._running = []

    def discard_iteration(self) -> None:
        """The iteration that runs does not count: it checked no gradients, or is captured in a CUDA graph."""
        self._running = []

    def close(self, wait: bool = False) -> Iterator[Iteration]:
        """Closes and yields open iterations, the oldest first: those whose answer has arrived, or all."""
        while self._open:
            skipped = self._open[0].skipped
            if not (wait or isinstance(skipped, bool) or skipped.has_arrived()):
                return
            iteration = self._open.popleft()
            self._count(iteration)
            yield iteration

    def _count(self, iteration: Iteration) -> None:
        before, events = self.counters, iteration.events
        skipped = iteration.was_skipped()
        grown = False
        if iteration.interval:
            self.good_iterations = 0 if skipped else self.good_iterations + 1
            grown = self.good_iterations >= iteration.interval
            self.good_iterations %= iteration.interval
        self.counters = Counters(
            before.steps + len(events),
            before.skipped + (sum(bool(event.skipped) for event in events) if skipped else 0),
            before.consecutive_skips + 1 if skipped else 0,
            before.growths + grown,
            before.backoffs + (skipped and iteration.interval > 0),
        )
        bad_loss = skipped and not all(event.loss_finite for event in events)
        self.bad_losses = self.bad_losses + 1 if bad_loss else 0
        self._count_stuck(float(iteration.scale) if skipped else math.inf)

    def _count_stuck(self, scale: float) -> None:
        """Counts for how many skipped iterations the scale has not fallen; infinity, for a good one, ends the count."""
        scale = max(scale, self._floor)
        fell = scale < self._lowest or scale == math.inf
        self.stuck = int(scale < math.inf) if fell else self.stuck + 1
        self._lowest = scale if scale == math.inf else min(scale, self._lowest)
