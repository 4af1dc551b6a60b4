"""Results of a scaler's steps: the latest step of each optimizer, a bounded history, and counters.

Invariants:
- adding a step does not wait for the device. An iteration is *open* while only the device knows whether it was skipped.
  Open iterations are closed in order, when the device's answer has arrived or when the counters are read;
- an iteration is closed once, and does not change afterwards.
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
from precast._internal.events import Counters, StepEvent

__all__ = ["Iteration", "StepHistory"]


@dataclass(frozen=True, slots=True)
class Iteration:
    """One training iteration, as recorded by `update`."""

    number: int
    scale: Tensor
    events: tuple[StepEvent, ...]
    interval: int
    """Good iterations until the scale grows; 0 if the scale was set by hand."""
    skipped: bool | _torch.HostCopy
    """True if a step was skipped; a copy of the flag if the device decided."""

    def is_decided(self) -> bool:
        """Return True if `was_skipped` would not wait."""
        return isinstance(self.skipped, bool) or self.skipped.has_arrived()

    def was_skipped(self) -> bool:
        """Return True if a step was skipped; wait for the device if necessary."""
        return self.skipped if isinstance(self.skipped, bool) else bool(self.skipped.read())


class StepHistory:
    """The records of a scaler's latest `length` steps. A scale below `floor` counts as `floor`."""

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
        """Skipped iterations in a row, up to the latest closed one, with a loss that was not finite."""
        self.stuck = 0
        """Skipped iterations in a row, up to the latest closed one, without a decrease of the scale."""
        self.good_iterations = good_iterations
        """Good iterations in a row since the scale changed, counted like the growth tracker."""
        self._lowest = math.inf
        self._floor = floor
        self._latest = WeakIdKeyDictionary()  # by identity: some optimizers cannot be hashed
        self._open: deque[Iteration] = deque()
        self._running: list[StepEvent] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy or pickle keeps the length and the counters, but no steps."""
        return StepHistory, (self.events.maxlen, self.counters, self.good_iterations)

    def add(self, optimizer: Optimizer, event: StepEvent) -> None:
        """Add a step to the current iteration."""
        self.events.append(event)
        self._latest[optimizer] = event
        self._running.append(event)

    def latest(self, optimizer: Optimizer) -> StepEvent | None:
        """Return the latest step of an optimizer."""
        event: StepEvent | None = self._latest.get(optimizer)
        return event

    def resume(self, good_iterations: int) -> None:
        """Start new rows of iterations after a state was loaded: earlier ones do not count as preceding."""
        deque(self.close(wait=True), maxlen=0)
        self.good_iterations = good_iterations
        self.bad_losses, self.stuck, self._lowest = 0, 0, math.inf
        self.counters = replace(self.counters, consecutive_skips=0)

    def end_iteration(
        self, number: int, scale: Tensor, skipped: bool | Tensor, interval: int
    ) -> None:
        """End the current iteration; `skipped` is a tensor if only the device knows."""
        result = _torch.HostCopy(skipped) if isinstance(skipped, Tensor) else skipped
        self._open.append(Iteration(number, scale, tuple(self._running), interval, result))
        self._running = []

    def discard_iteration(self) -> None:
        """Drop the current iteration, which checked no gradients or is captured in a CUDA graph."""
        self._running = []

    def close(self, wait: bool = False) -> Iterator[Iteration]:
        """Close and yield open iterations, oldest first: those that are decided, or all if `wait`."""
        while self._open and (wait or self._open[0].is_decided()):
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
        if not skipped:
            self.bad_losses, self.stuck, self._lowest = 0, 0, math.inf
            return
        bad_loss = not all(event.loss_finite for event in events)
        self.bad_losses = self.bad_losses + 1 if bad_loss else 0
        scale = max(float(iteration.scale), self._floor)
        self.stuck = 1 if scale < self._lowest else self.stuck + 1
        self._lowest = min(scale, self._lowest)
