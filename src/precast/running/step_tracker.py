"""Detection of the steps of a program, with the loss, scale and duration of each.

Invariants:

- in a program that trains, a step is an optimizer's step, or one that a scaler skips; optimizers that step one after
  the other on the gradients of the same backward passes share a step;
- in a program that does not train, a step is a module's call from outside of all modules. A call that records gradients
  may belong to training: it is a step when the module is called again before a backward pass. The first backward pass
  discards the steps before it, and the count starts again;
- while a tracker runs, all events use its numbers (`events.step_trackers`);
- nothing here runs an operation of the program or waits for a device, and only numbers are stored for a step;
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
from precast.report.schema import StepData
from precast.running.step_log import StepLog

__all__ = ["StepTracker"]

_MOST_UNREAD: Final = 64
"""The most steps with values that a device still computes, before the oldest is waited for."""
_MOST_LOSSES: Final = 1024
"""The most losses of one step that are added up."""


class StepTracker:
    """Numbers the steps of this process, for a report, for monitors, and for gradient scalers.

    Args:
        boundary: called with the number of each step before it computes anything: with 0 at the start, and again if
            calls that looked like inference were the beginning of training.
        outermost: called with each module that is called from outside of all modules, before the module runs.
        evaluated: called with such a module and its output, if the call recorded no gradients.
    """

    def __init__(
        self,
        boundary: Callable[[int], None],
        outermost: Callable[[nn.Module], None],
        evaluated: Callable[[nn.Module, Any], None] = lambda _module, _output: None,
    ) -> None:
        self.history = StepLog()
        self.failures = Failures()
        self.trains = False
        self.mutex = ForkSafeLock()
        self._boundary = boundary
        self._outermost = outermost
        self._evaluated = evaluated
        self.number = 0
        """The number of the current step."""
        self._losses: list[_DeferredNumber] = []
        self._began: float | None = None
        self._call_began: float | None = None
        self._called: set[int] = set()
        """The ids of modules that were called in this step, until it is known that the program trains."""
        self._stepping = False
        self._done: deque[_FinishedStep] = deque()
        self._last_is_open = False
        """True while further optimizers may take part in the latest step."""
        self._stop: list[Callable[[], None]] = []

    def start(self) -> None:
        """Start to watch the program."""
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
        """Stop watching, and wait for values that devices still compute."""
        while self._stop:
            self._stop.pop()()
        if self._called and not self.trains:
            self._end()
        self._settle(wait=True)

    @synchronized
    def before_step(self, optimizer: Optimizer) -> int:
        """Return the number of the step that an optimizer is about to take or to skip."""
        step = self._open_step()
        return self.number if step is None or id(optimizer) in step.optimizers else step.step

    @synchronized
    def after_step(self, optimizer: Optimizer) -> int:  # noqa: ARG002 -- as `StepNumbers` has it
        """Return the number of the step that an optimizer has just taken or skipped."""
        step = self._open_step()
        return self.number if step is None else step.step

    @synchronized
    def scaled(self, event: StepEvent) -> None:
        """Record a scaler's step, after the optimizer's own or in its place."""
        self._train()
        open_step = self._open_step()
        is_new = open_step is None or event.optimizer in open_step.scaled
        step = self._end() if open_step is None or is_new else open_step
        step.scaled.add(event.optimizer)
        step.scale = _DeferredNumber(event.scale)
        if isinstance(event.skipped, Tensor):
            step.skipped.append(_DeferredNumber(event.skipped))
        elif event.skipped:
            step.skipped.append(_DeferredNumber(1.0))
            step.names += event.names
            step.first = step.first or event.first

    # --- called by PyTorch ---

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
        if self.trains:  # perhaps only since the call began
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
            return  # a step with a closure counts its first loss only
        if gradients is None and len(self._losses) < _MOST_LOSSES:
            several = roots if isinstance(roots, list | tuple) else [roots]
            tensors = [each for each in several if isinstance(each, Tensor)]
            self._losses += [
                _DeferredNumber(each)
                for each in tensors
                if each.numel() == 1 and each.is_floating_point()
            ]

    @synchronized
    def _optimizer_begins(self, _optimizer: Optimizer) -> None:
        self._stepping = True

    @synchronized
    def _optimizer_ends(self, optimizer: Optimizer) -> None:
        self._stepping = False
        self._train()
        open_step = self._open_step()
        is_new = open_step is None or id(optimizer) in open_step.optimizers
        step = self._end() if open_step is None or is_new else open_step
        step.optimizers.add(id(optimizer))

    # --- steps ---

    def _train(self) -> None:
        """Switch to training: the calls so far were no inference."""
        if self.trains:
            return
        self.trains = True
        if self.number:
            self.history, self.number, self._began = StepLog(), 0, self._call_began
            self._done.clear()
            self._boundary(0)

    def _open_step(self) -> _FinishedStep | None:
        """Return the latest finished step, while further optimizers may take part in it."""
        return self._done[-1] if self.trains and self._done and self._last_is_open else None

    def _end(self) -> _FinishedStep:
        now = time.perf_counter()
        start = self._call_began if self._began is None else self._began
        step = _FinishedStep(self.number, None if start is None else now - start, self._losses)
        self._losses, self._began, self._last_is_open = [], now, True
        self.number += 1
        self._called.clear()
        self._settle()
        self._done.append(step)
        self._boundary(self.number)
        return step

    def _settle(self, wait: bool = False) -> None:
        while self._done:
            is_due = len(self._done) > _MOST_UNREAD and not _torch.is_capturing()
            if not (wait or is_due or self._done[0].is_ready()):
                return
            self.history.add(self._done.popleft().read())


class _DeferredNumber:
    """A number of the program that its device may still compute; None if it cannot be read.

    A number of an iteration that is captured in a CUDA graph is not computed.
    """

    __slots__ = ("_unread", "_value")

    def __init__(self, number: Tensor | float) -> None:
        self._value: float | None = None if isinstance(number, Tensor) else number
        self._unread: _torch.HostCopy | None = None
        if not isinstance(number, Tensor) or _torch.is_captured(number):
            return
        with _torch.without_dispatch(), suppress(Exception):
            copy = _torch.HostCopy(number.detach())
            if copy.has_arrived():
                self._value = copy.read()
            else:
                self._unread = copy

    def is_ready(self) -> bool:
        return self._unread is None or self._unread.has_arrived()

    def value(self) -> float | None:
        if self._unread is not None:
            self._value, self._unread = self._unread.read(), None
        return self._value


@dataclass(slots=True)
class _FinishedStep:
    """A finished step, with values that a device may still compute."""

    step: int
    seconds: float | None
    losses: list[_DeferredNumber]
    scale: _DeferredNumber | None = None
    skipped: list[_DeferredNumber] = field(default_factory=list)
    names: tuple[str, ...] = ()
    first: NonfiniteOrigin | None = None
    optimizers: set[int] = field(default_factory=set)
    scaled: set[int] = field(default_factory=set)

    def is_ready(self) -> bool:
        numbers = (*self.losses, *self.skipped, *([self.scale] if self.scale else []))
        return all(number.is_ready() for number in numbers)

    def read(self) -> StepData:
        scale = self.scale.value() if self.scale else None
        values = [loss.value() for loss in self.losses]
        losses = [loss for loss in values if loss is not None]
        loss = sum(losses) / (scale or 1.0) if losses else None
        skipped = any(number.value() for number in self.skipped)
        first = self.first and self.first.with_step(self.step)
        return StepData(self.step, loss, scale, skipped, list(self.names), self.seconds, first)
