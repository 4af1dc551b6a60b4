"""Observes PyTorch's gradient scalers: what each step did, and which steps no lower scale would have helped.

Invariants: the scalers stay PyTorch's and do what they do without precast; a step that is decided on the device is not
waited for. A `precast.GradScaler`, which a program makes itself, tells of its steps without this.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from precast import _torch
from precast._internal.events import ScalerDiagnosis, StepEvent, after_step, scaler_listeners
from precast.diagnostics.failures import Failures
from precast.grad_scaler.diagnosis import diagnoses
from precast.grad_scaler.nonfinite import NonfiniteDetails, loss_to_keep
from precast.grad_scaler.settings import DEFAULT_LIMITS, Limits
from precast.grad_scaler.step_history import StepHistory

__all__ = ["ScalerObserver"]

_MOST_LOSSES: Final = 1024  # of one iteration that are remembered
_KEPT: Final = 16  # steps


@dataclass(eq=False)
class _Seen:
    """What was seen of one scaler."""

    limits: Limits
    """The limits of a `precast.GradScaler` with the same first scale; PyTorch's scaler has none."""
    history: StepHistory
    iterations: int = 0
    losses: tuple[Tensor, ...] = ()
    steps: list[tuple[StepEvent, Tensor]] = field(default_factory=list)
    """The steps of this iteration, each with a number that is not 0 if a gradient was not finite."""


class ScalerObserver:
    """Observes all of PyTorch's scalers from `start` until `stop`.

    Args:
        stepped: called with an optimizer and what a scaler's step on it did.
        diagnosed: called with each diagnosis that a `precast.GradScaler` in a scaler's place would have raised.
    """

    def __init__(
        self,
        stepped: Callable[[Optimizer, StepEvent], None],
        diagnosed: Callable[[ScalerDiagnosis], None],
    ) -> None:
        self._stepped = stepped
        self._diagnosed = diagnosed
        self.failures = Failures()
        self._seen = WeakIdKeyDictionary()
        self._stop: list[Callable[[], None]] = []

    def start(self) -> None:
        """Begins to observe."""
        acts = {
            "scale": self._scale,
            "step": self._step,
            "unscale_": self._unscale,
            "update": self._update,
        }
        self._stop = [_torch.on_scaler_call(name, act) for name, act in acts.items()]

    def stop(self) -> None:
        """Ends it, and waits for what devices have still to decide."""
        while self._stop:
            self._stop.pop()()
        for seen in self._seen.values():
            self.failures.call("diagnosis", self._diagnose, seen, True)

    def _scale(self, scaler: Any, run: Callable[[], Any], outputs: Any, *_: Any) -> Any:
        # Before the call, as the scale is still a Python number in the first one.
        self.failures.call_unseen("scale", self._add_losses, scaler, outputs)
        for listener in scaler_listeners:
            listener.scaled(scaler)
        return run()

    def _unscale(self, scaler: Any, run: Callable[[], Any], optimizer: Optimizer, *_: Any) -> Any:
        for listener in scaler_listeners:
            listener.unscales(scaler, optimizer)
        return run()

    def _add_losses(self, scaler: Any, outputs: Any) -> None:
        seen = self._of(scaler)
        if not _torch.is_functorch_active():
            with _torch.without_dispatch():
                new = (loss_to_keep(each) for each in _tensors(outputs) if each.is_floating_point())
                seen.losses = (*seen.losses, *new)[:_MOST_LOSSES]

    def _step(self, scaler: Any, run: Callable[[], Any], optimizer: Optimizer, *_: Any) -> Any:
        for listener in scaler_listeners:
            listener.unscales(scaler, optimizer)
        begun = time.perf_counter()
        result = run()
        seconds = time.perf_counter() - begun
        self.failures.call_unseen("step", self._add_step, scaler, optimizer, seconds)
        return result

    def _add_step(self, scaler: Any, optimizer: Optimizer, seconds: float) -> None:
        found = _torch.found_infs_of(scaler, optimizer)
        scale = _torch.scale_of(scaler)
        if found and scale is not None and not _torch.is_captured(scale):
            with _torch.without_dispatch():
                self._tell(self._of(scaler), optimizer, found, scale, seconds)

    def _tell(
        self, seen: _Seen, optimizer: Optimizer, found: list[Tensor], scale: Tensor, seconds: float
    ) -> None:
        found_inf = sum((each.to(scale.device) for each in found), torch.zeros_like(scale))
        # An optimizer that handles the scale decides on the device, so nobody has waited for that; else the scaler has.
        skipped = found_inf if _torch.handles_scaling(optimizer) else bool(found_inf)
        details = NonfiniteDetails(optimizer, seen.losses)
        if skipped is True:
            details.look_up()  # while the gradients are there
        number = len(seen.steps)
        step = after_step(optimizer, own=seen.iterations)
        event = StepEvent(number, step, scale, skipped, seconds, details)
        seen.steps.append((event, found_inf))
        seen.history.add(optimizer, event)
        self._stepped(optimizer, event)

    def _update(self, scaler: Any, run: Callable[[], Any], *_: Any) -> Any:
        self.failures.call_unseen("update", self._end_steps, scaler)
        for listener in scaler_listeners:
            listener.updated(scaler)
        result = run()
        self.failures.call_unseen("update", self._begin_iteration, scaler)
        return result

    def _end_steps(self, scaler: Any) -> None:
        seen = self._of(scaler)
        if seen.steps:
            with _torch.without_dispatch():
                self._end(seen, int(scaler.get_growth_interval()))

    def _begin_iteration(self, scaler: Any) -> None:
        seen = self._of(scaler)
        seen.losses, seen.steps = (), []
        seen.iterations += 1

    def _end(self, seen: _Seen, interval: int) -> None:
        """Adds the iteration to the history and diagnoses it."""
        events, found_infs = zip(*seen.steps, strict=True)
        is_known = all(isinstance(event.skipped, bool) for event in events)
        skipped = any(e.skipped for e in events) if is_known else sum(found_infs[1:], found_infs[0])
        scale = seen.steps[0][0].scale
        seen.history.end_iteration(seen.iterations, scale, skipped, interval)
        self._diagnose(seen, wait=False)

    def _diagnose(self, seen: _Seen, wait: bool) -> None:
        for diagnosis in diagnoses(seen.history, seen.limits, wait):
            self._diagnosed(diagnosis)

    def _of(self, scaler: Any) -> _Seen:
        if scaler not in self._seen:
            floor = min(DEFAULT_LIMITS.min_scale, float(scaler.get_scale()))
            limits = replace(DEFAULT_LIMITS, min_scale=floor)
            self._seen[scaler] = _Seen(limits, StepHistory(_KEPT, floor=floor))
        seen: _Seen = self._seen[scaler]
        return seen


def _tensors(outputs: Any) -> Iterator[Tensor]:
    """The tensors in lists and tuples; an iterator is left to the program, as it gives its items only once."""
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, list | tuple):
        for each in outputs:
            yield from _tensors(each)
