"""Observation of PyTorch's gradient scalers: the outcome of each step, and diagnoses of skipped steps.

Invariants: the scalers behave as without precast, and no decision on a device is waited for. A `precast.GradScaler` is
not observed, because it reports its steps itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from precast import _torch
from precast._internal.events import ScalerDiagnosis, StepEvent, after_step, scaler_listeners
from precast._internal.pytree import tensors_in
from precast.diagnostics.failures import Failures
from precast.grad_scaler.diagnosis import diagnoses
from precast.grad_scaler.nonfinite import NonfiniteDetails, loss_to_keep
from precast.grad_scaler.settings import DEFAULT_LIMITS, Limits
from precast.grad_scaler.step_history import StepHistory

__all__ = ["ScalerObserver"]

_MAX_LOSSES: Final = 1024  # in one iteration
_MAX_STEPS: Final = 16


@dataclass(eq=False)
class _ScalerState:
    """The observed state of one scaler."""

    limits: Limits
    """The limits that a `precast.GradScaler` with this initial scale has."""
    history: StepHistory
    iterations: int = 0
    losses: tuple[Tensor, ...] = ()
    steps: list[tuple[StepEvent, Tensor]] = field(default_factory=list)
    """The steps of this iteration, each with a tensor that is nonzero if a gradient was not finite."""


class ScalerObserver:
    """Observes all of PyTorch's scalers from `start` until `stop`.

    `on_diagnosis` gets the diagnoses that a `precast.GradScaler` would have made.
    """

    def __init__(
        self,
        on_step: Callable[[Optimizer, StepEvent], None],
        on_diagnosis: Callable[[ScalerDiagnosis], None],
    ) -> None:
        self._on_step = on_step
        self._on_diagnosis = on_diagnosis
        self.failures = Failures()
        self._states = WeakIdKeyDictionary()
        self._stop: list[Callable[[], None]] = []

    def start(self) -> None:
        """Start the observation."""
        callbacks = {
            "scale": self._scale,
            "step": self._step,
            "unscale_": self._unscale,
            "update": self._update,
        }
        self._stop = [_torch.on_scaler_call(name, callback) for name, callback in callbacks.items()]

    def stop(self) -> None:
        """Stop the observation, and wait for decisions on devices."""
        while self._stop:
            self._stop.pop()()
        for state in self._states.values():
            self.failures.call("diagnosis", self._diagnose, state, True)

    def _scale(self, scaler: Any, run: Callable[[], Any], outputs: Any, *_: Any) -> Any:
        # Before the call: in the first one, the scale is still a Python number.
        self.failures.call_unseen("scale", self._add_losses, scaler, outputs)
        for listener in scaler_listeners:
            listener.on_scale(scaler)
        return run()

    def _unscale(self, scaler: Any, run: Callable[[], Any], optimizer: Optimizer, *_: Any) -> Any:
        for listener in scaler_listeners:
            listener.on_unscale(scaler, optimizer)
        return run()

    def _add_losses(self, scaler: Any, outputs: Any) -> None:
        state = self._state_of(scaler)
        if not _torch.is_functorch_active():
            with _torch.without_dispatch():
                new = (
                    loss_to_keep(each) for each in tensors_in(outputs) if each.is_floating_point()
                )
                state.losses = (*state.losses, *new)[:_MAX_LOSSES]

    def _step(self, scaler: Any, run: Callable[[], Any], optimizer: Optimizer, *_: Any) -> Any:
        for listener in scaler_listeners:
            listener.on_unscale(scaler, optimizer)
        start = time.perf_counter()
        result = run()
        seconds = time.perf_counter() - start
        self.failures.call_unseen("step", self._add_step, scaler, optimizer, seconds)
        return result

    def _add_step(self, scaler: Any, optimizer: Optimizer, seconds: float) -> None:
        found_infs = _torch.found_inf_tensors(scaler, optimizer)
        scale = _torch.scale_of(scaler)
        if found_infs and scale is not None and not _torch.is_captured(scale):
            with _torch.without_dispatch():
                self._report_step(self._state_of(scaler), optimizer, found_infs, scale, seconds)

    def _report_step(
        self,
        state: _ScalerState,
        optimizer: Optimizer,
        found_infs: list[Tensor],
        scale: Tensor,
        seconds: float,
    ) -> None:
        found_inf = sum((each.to(scale.device) for each in found_infs), torch.zeros_like(scale))
        # An optimizer that handles the scale decides on the device without waiting; otherwise the scaler has waited.
        skipped = found_inf if _torch.handles_scaling(optimizer) else bool(found_inf)
        details = NonfiniteDetails(optimizer, state.losses)
        if skipped is True:
            details.look_up()  # before the gradients are freed
        number = len(state.steps)
        step = after_step(optimizer, own=state.iterations)
        event = StepEvent(number, step, scale, skipped, seconds, details)
        state.steps.append((event, found_inf))
        state.history.add(optimizer, event)
        self._on_step(optimizer, event)

    def _update(self, scaler: Any, run: Callable[[], Any], *_: Any) -> Any:
        self.failures.call_unseen("update", self._end_steps, scaler)
        for listener in scaler_listeners:
            listener.on_update(scaler)
        result = run()
        self.failures.call_unseen("update", self._begin_iteration, scaler)
        return result

    def _end_steps(self, scaler: Any) -> None:
        state = self._state_of(scaler)
        if state.steps:
            with _torch.without_dispatch():
                self._end(state, int(scaler.get_growth_interval()))

    def _begin_iteration(self, scaler: Any) -> None:
        state = self._state_of(scaler)
        state.losses, state.steps = (), []
        state.iterations += 1

    def _end(self, state: _ScalerState, interval: int) -> None:
        events, found_infs = zip(*state.steps, strict=True)
        is_decided = all(isinstance(event.skipped, bool) for event in events)
        skipped = (
            any(e.skipped for e in events) if is_decided else sum(found_infs[1:], found_infs[0])
        )
        scale = state.steps[0][0].scale
        state.history.end_iteration(state.iterations, scale, skipped, interval)
        self._diagnose(state, wait=False)

    def _diagnose(self, state: _ScalerState, wait: bool) -> None:
        for diagnosis in diagnoses(state.history, state.limits, wait):
            self._on_diagnosis(diagnosis)

    def _state_of(self, scaler: Any) -> _ScalerState:
        if scaler not in self._states:
            floor = min(DEFAULT_LIMITS.min_scale, float(scaler.get_scale()))
            limits = replace(DEFAULT_LIMITS, min_scale=floor)
            self._states[scaler] = _ScalerState(limits, StepHistory(_MAX_STEPS, floor=floor))
        state: _ScalerState = self._states[scaler]
        return state
