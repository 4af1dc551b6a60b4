"""Where a step of a program ends, and what was in it.

Invariants:

- in a program that trains a step is an optimizer's, done, or skipped by a scaler; optimizers that step one after the
  other on the gradients of the same backward passes are in one step;
- in one that does not, a step is a module's call from outside of all modules. A call that records gradients may belong
  to training: it is a step when the module is called again before a backward pass. Steps before the first backward
  pass are forgotten when it comes, and the count begins anew;
- while one tracker runs, its numbers are those of all who tell of a step (`events.step_trackers`);
- nothing here is an operation of the program's or waits for a device; nothing but numbers is kept of a step;
- one thread at a time is in here, but for what the program computes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
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
from precast.diagnostics.kept_steps import KeptSteps
from precast.diagnostics.numerics.nonfinite_origin import recorded
from precast.diagnostics.schema import Step

__all__ = ["StepTracker"]

_MOST_ON_THEIR_WAY: Final = 64  # steps, before the oldest is waited for
_MOST_LOSSES: Final = 1024  # of one step that are added up


class StepTracker:
    """Finds the steps of this process and numbers them: for a report, for monitors, and for gradient scalers.

    Args:
        boundary: called with the number of each step that begins, before anything in it is computed: 0 at the start,
            and once more where what looked like inference was the beginning of training.
        outermost: called with each module that is called from outside of all modules, before it runs.
    """

    def __init__(
        self, boundary: Callable[[int], None], outermost: Callable[[nn.Module], None]
    ) -> None:
        self.history = KeptSteps()
        self.trains = False
        self.mutex = ForkSafeLock()
        self._boundary = boundary
        self._outermost = outermost
        self._number = 0
        self._losses: list[_Number] = []
        self._began: float | None = None
        self._call_began: float | None = None
        self._called: set[int] = set()  # modules, while nobody knows whether it is training
        self._stepping = False
        self._done: deque[_Done] = deque()
        self._open_for_facts = False  # the latest of those
        self._stop: list[Callable[[], None]] = []

    @property
    def number(self) -> int:
        """Of the step that runs."""
        return self._number

    def start(self) -> None:
        """Begins to look."""
        events.step_trackers.append(self)
        self._stop = [
            lambda: events.step_trackers.remove(self),
            on_optimizer_step(before=self._optimizer_begins, after=self._optimizer_ends),
            _torch.on_backward(self._backward),
            _torch.on_module_call(self._call),
        ]
        self._boundary(0)

    @synchronized
    def stop(self) -> None:
        """Looks no more, and waits for numbers that are on their way."""
        while self._stop:
            self._stop.pop()()
        if self._called and not self.trains:
            self._end()
        self._settle(wait=True)

    @synchronized
    def before_step(self, optimizer: Optimizer) -> int:
        """The number of the step that an optimizer is about to take or to skip."""
        known = self._open_step()
        return self._number if known is None or id(optimizer) in known.optimizers else known.step

    @synchronized
    def after_step(self, optimizer: Optimizer) -> int:  # noqa: ARG002 -- as `StepNumbers` has it
        """The number of the step that an optimizer has just taken or skipped."""
        known = self._open_step()
        return self._number if known is None else known.step

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

    def _call(self, module: nn.Module, run: Callable[[], Any]) -> Any:
        self._call_begins(module)
        try:
            return run()
        finally:
            self._call_ends(module)

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
            self._open_for_facts = False
        elif self._losses:
            return  # a closure's: the first is the one that the step returns
        if gradients is None and len(self._losses) < _MOST_LOSSES:
            tensors = roots if isinstance(roots, list | tuple) else [roots]
            self._losses += [_Number(t) for t in tensors if isinstance(t, Tensor) and _is_a_loss(t)]

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
        """What was seen so far was no inference."""
        if self.trains:
            return
        self.trains = True
        if self._number:
            self.history, self._number, self._began = KeptSteps(), 0, self._call_began
            self._done.clear()
            self._boundary(0)

    def _open_step(self) -> _Done | None:
        """The latest step that is over, while further optimizers may still take part in it."""
        return self._done[-1] if self.trains and self._done and self._open_for_facts else None

    def _end(self) -> _Done:
        now = time.perf_counter()
        began = self._call_began if self._began is None else self._began
        step = _Done(self._number, None if began is None else now - began, self._losses)
        self._losses, self._began, self._open_for_facts = [], now, True
        self._number += 1
        self._called.clear()
        self._settle()
        self._done.append(step)
        self._boundary(self._number)
        return step

    def _settle(self, wait: bool = False) -> None:
        while self._done:
            if not (wait or self._done[0].is_known() or len(self._done) > _MOST_ON_THEIR_WAY):
                return
            self.history.add(self._done.popleft().known())


class _Number:
    """A number of the program's, read when its device has computed it, without waiting."""

    __slots__ = ("_event", "_tensor", "_value")

    def __init__(self, number: Tensor | float) -> None:
        self._event: Any = None
        self._tensor: Tensor | None = None
        self._value: float | None = None
        if not isinstance(number, Tensor):
            self._value = number
            return
        try:
            with _torch.without_dispatch():
                self._tensor, self._event = _torch.copy_to_host_async(number.detach())
                if self._event is None:
                    self._value, self._tensor = float(self._tensor), None
        except (
            RuntimeError,
            TypeError,
            ValueError,
        ):  # a tensor without contents, one of a strange kind
            self._tensor = None

    def is_known(self) -> bool:
        return self._tensor is None or self._event.query()

    def value(self) -> float | None:
        if self._tensor is not None:
            self._event.synchronize()
            with _torch.without_dispatch():
                self._value, self._tensor = float(self._tensor), None
        return self._value


@dataclass(slots=True)
class _Done:
    """A step that is over, and what is still on its way."""

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


def _is_a_loss(root: Tensor) -> bool:
    return root.numel() == 1 and root.is_floating_point()
