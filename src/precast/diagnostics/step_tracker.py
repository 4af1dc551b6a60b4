"""Finds where each step of a program ends, and its loss, scale and duration.

Invariants:

- in a program that trains, a step is one of an optimizer, or one that a scaler skips; optimizers that step one after
  the other on the gradients of the same backward passes share a step;
- in a program that does not train, a step is a module's call from outside of all modules. A call that records gradients
  may belong to training: it is a step when the module is called again before a backward pass. The first backward pass
  discards the steps before it, and the count starts anew;
- while a tracker runs, all events use its numbers (`events.step_trackers`);
- nothing here runs an operation of the program or waits for a device, and only numbers are kept of a step;
- one thread at a time runs the methods, except while the program computes.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from precast import _torch
from precast._internal import events
from precast._internal.events import NonfiniteOrigin, StepEvent
from precast._internal.locks import ForkSafeLock, synchronized
from precast._torch.optimizer_hooks import on_optimizer_step
from precast.diagnostics.failures import Failures
from precast.diagnostics.kept_steps import KeptSteps
from precast.diagnostics.numerics.nonfinite_origin import recorded
from precast.diagnostics.schema import Step

__all__ = ["StepTracker"]

_MOST_UNREAD: Final = 64
"""So many steps may have numbers that a device still computes, before the oldest is waited for."""
_MOST_LOSSES: Final = 1024
"""At most so many losses of one step are added up."""


class StepTracker:
    """Finds the steps of this process and numbers them: for a report, for monitors, and for gradient scalers.

    Args:
        boundary: called with the number of each step before anything in it is computed: with 0 at the start, and once
            more if what looked like inference was the beginning of training.
        outermost: called with each module that is called from outside of all modules, before the module runs.
        evaluated: called with such a module and its output, if the call recorded no gradients.
    """

    def __init__(
        self,
        boundary: Callable[[int], None],
        outermost: Callable[[nn.Module], None],
        evaluated: Callable[[nn.Module, Any], None] = lambda _module, _output: None,
    ) -> None:
        self.history = KeptSteps()
        self.failures = Failures()
        self.trains = False
        self.mutex = ForkSafeLock()
        self._boundary = boundary
        self._outermost = outermost
        self._evaluated = evaluated
        self.number = 0
        """The number of the step that runs."""
        self._losses: list[_Number] = []
        self._began: float | None = None
        self._call_began: float | None = None
        self._called: set[int] = set()
        """The ids of modules that were called in this step, as long as the program may be training or not."""
        self._stepping = False
        self._done: deque[_Done] = deque()
        self._last_is_open = False
        """Whether further optimizers may still take part in the latest step of these."""
        self._stop: list[Callable[[], None]] = []

    def start(self) -> None:
        """Starts to watch the program."""
        events.step_trackers.append(self)
        begins, ends = self._guarded(self._optimizer_begins), self._guarded(self._optimizer_ends)
        self._stop = [
            lambda: events.step_trackers.remove(self),
            on_optimizer_step(before=begins, after=ends),
            _torch.on_backward(self._guarded(self._backward)),
            _torch.on_module_call(self._call),
        ]
        self._boundary(0)

    @synchronized
    def stop(self) -> None:
        """Stops watching, and waits for the numbers that devices still compute."""
        while self._stop:
            self._stop.pop()()
        if self._called and not self.trains:
            self._end()
        self._settle(wait=True)

    @synchronized
    def before_step(self, optimizer: Optimizer) -> int:
        """The number of the step that an optimizer is about to take or to skip."""
        known = self._open_step()
        return self.number if known is None or id(optimizer) in known.optimizers else known.step

    @synchronized
    def after_step(self, optimizer: Optimizer) -> int:  # noqa: ARG002 -- as `StepNumbers` has it
        """The number of the step that an optimizer has just taken or skipped."""
        known = self._open_step()
        return self.number if known is None else known.step

    @synchronized
    def scaled(self, event: StepEvent) -> None:
        """A scaler's step has ended: after the optimizer's own, or in its place."""
        self._train()
        known = self._open_step()
        step = self._end() if known is None or event.optimizer in known.scaled else known
        step.scaled.add(event.optimizer)
        step.scale = _Number(event.scale)
        if isinstance(event.skipped, Tensor):
            step.skipped.append(_Number(event.skipped))
        elif event.skipped:
            step.skipped.append(_Number(1.0))
            step.names += event.names
            step.first = step.first or event.first

    # --- what PyTorch calls ---

    def _guarded(self, method: Callable[..., None]) -> Callable[..., None]:
        """Return a method whose exceptions do not reach the program."""
        return functools.partial(self.failures.call_unseen, method.__name__, method)

    def _call(self, module: nn.Module, run: Callable[[], Any]) -> Any:
        self.failures.call_unseen("call of a module", self._call_begins, module)
        try:
            output = run()
            if not torch.is_grad_enabled():
                self.failures.call_unseen("call of a module", self._evaluated, module, output)
            return output
        finally:
            self.failures.call_unseen("call of a module", self._call_ends, module)

    @synchronized
    def _call_begins(self, module: nn.Module) -> None:
        if not self.trains:
            if id(module) in self._called:
                self._end()
            self._call_began = time.perf_counter()
        self._outermost(module)

    @synchronized
    def _call_ends(self, module: nn.Module) -> None:
        if self.trains:  # perhaps only since it began
            return
        if torch.is_grad_enabled():
            self._called.add(id(module))
        else:
            self._end()

    @synchronized
    def _backward(self, roots: object, gradients: object) -> None:
        self._train()
        if not self._stepping:
            self._last_is_open = False
        elif self._losses:
            return  # of the losses of a closure, the step returns the first
        if gradients is None and len(self._losses) < _MOST_LOSSES:
            several = roots if isinstance(roots, list | tuple) else [roots]
            tensors = [each for each in several if isinstance(each, Tensor)]
            self._losses += [
                _Number(each) for each in tensors if each.numel() == 1 and each.is_floating_point()
            ]

    @synchronized
    def _optimizer_begins(self, _optimizer: Optimizer) -> None:
        self._stepping = True

    @synchronized
    def _optimizer_ends(self, optimizer: Optimizer) -> None:
        self._stepping = False
        self._train()
        known = self._open_step()
        step = self._end() if known is None or id(optimizer) in known.optimizers else known
        step.optimizers.add(id(optimizer))

    # --- steps ---

    def _train(self) -> None:
        """Notes that the program trains: what was seen so far was no inference."""
        if self.trains:
            return
        self.trains = True
        if self.number:
            self.history, self.number, self._began = KeptSteps(), 0, self._call_began
            self._done.clear()
            self._boundary(0)

    def _open_step(self) -> _Done | None:
        """The latest step that is over, while further optimizers may still take part in it."""
        return self._done[-1] if self.trains and self._done and self._last_is_open else None

    def _end(self) -> _Done:
        now = time.perf_counter()
        began = self._call_began if self._began is None else self._began
        step = _Done(self.number, None if began is None else now - began, self._losses)
        self._losses, self._began, self._last_is_open = [], now, True
        self.number += 1
        self._called.clear()
        self._settle()
        self._done.append(step)
        self._boundary(self.number)
        return step

    def _settle(self, wait: bool = False) -> None:
        while self._done:
            if not (wait or self._done[0].is_known() or len(self._done) > _MOST_UNREAD):
                return
            self.history.add(self._done.popleft().known())


class _Number:
    """A number of the program, read when its device has computed it, without waiting; None if it cannot be read."""

    __slots__ = ("_unread", "_value")

    def __init__(self, number: Tensor | float) -> None:
        self._value: float | None = None if isinstance(number, Tensor) else number
        self._unread: tuple[Tensor, Any] | None = None
        """A copy on the host, and the event of its being written."""
        if not isinstance(number, Tensor):
            return
        with _torch.without_dispatch(), suppress(Exception):
            copy, event = _torch.copy_to_host_async(number.detach())
            if event is None:
                self._value = float(copy)
            else:
                self._unread = copy, event

    def is_known(self) -> bool:
        return self._unread is None or self._unread[1].query()

    def value(self) -> float | None:
        if self._unread is not None:
            copy, event = self._unread
            event.synchronize()
            with _torch.without_dispatch():
                self._value, self._unread = float(copy), None
        return self._value


@dataclass(slots=True)
class _Done:
    """A step that is over, with numbers that may not be known yet."""

    step: int
    seconds: float | None
    losses: list[_Number]
    scale: _Number | None = None
    skipped: list[_Number] = field(default_factory=list)
    names: tuple[str, ...] = ()
    first: NonfiniteOrigin | None = None
    optimizers: set[int] = field(default_factory=set)
    scaled: set[int] = field(default_factory=set)

    def is_known(self) -> bool:
        numbers = (*self.losses, *self.skipped, *([self.scale] if self.scale else []))
        return all(number.is_known() for number in numbers)

    def known(self) -> Step:
        scale = self.scale.value() if self.scale else None
        losses = [loss.value() for loss in self.losses]
        known = [loss for loss in losses if loss is not None]
        loss = sum(known) / (scale or 1.0) if known else None
        skipped = any(number.value() for number in self.skipped)
        first = recorded(self.first and self.first.numbered(self.step))
        return Step(self.step, loss, scale, skipped, list(self.names), self.seconds, first)
