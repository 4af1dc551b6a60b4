"""Dynamic loss scaling: prevents underflow of small float16 gradients, and steps on infinite ones.

A loss is multiplied by the scale, so that its gradients stay inside float16's range. Before the optimizer's step the
gradients are divided by the scale and checked. If one is infinite or NaN, the step is skipped and the scale shrinks;
after `growth_interval` good iterations in a row it grows.

Invariants:
- the scaler waits for a device only in `step` (once; not with a fused optimizer), in skipped steps, in the search for a
  first scale, in `get_scale` and `state_dict`, and when it is pickled or loaded. While nothing overflows, it waits
  exactly where `torch.amp.GradScaler` does;
- no optimizer steps on gradients that are scaled or not finite; they are checked again after `unscale_`;
- a skipped step changes no parameter, no guarded buffer, and no state of the optimizer;
- the scale is finite and between its limits after every `update`;
- scale and growth tracker stay the same tensors, on the device of the first scaled loss: CUDA graphs read them.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from precast import _torch
from precast._internal import events
from precast._internal.display import Card, Displayed
from precast._internal.events import Counters, StepEvent
from precast.errors import BrokenModelError, ScalerError
from precast.grad_scaler import gradients, next_scale, settings
from precast.grad_scaler import state_dict as state_dicts
from precast.grad_scaler.buffers import BufferGuard, guarded
from precast.grad_scaler.checks import GradientChecks
from precast.grad_scaler.closures import closure_in, step_with_closure
from precast.grad_scaler.diagnosis import act_on, diagnoses
from precast.grad_scaler.disabled import when_disabled
from precast.grad_scaler.display import card
from precast.grad_scaler.gradients import FoundInf
from precast.grad_scaler.memory import moved
from precast.grad_scaler.optimizer_state import OptimizerState, PerOptimizerStates
from precast.grad_scaler.optimizers import (
    prepare_fused_step,
    step_given_scaler,
    takes_scaler,
    temporary_attributes,
)
from precast.grad_scaler.outputs import map_losses
from precast.grad_scaler.settings import OnDiagnosis
from precast.grad_scaler.step_history import StepHistory

__all__ = ["GradScaler"]

T = TypeVar("T")
_HISTORY = 100  # default length of the history, in steps

Result = tuple[
    float | None, bool | Tensor
]  # the optimizer's return value; True if the step was skipped


# A subclass of PyTorch's, because trainers check isinstance() before they call `unscale_`. PyTorch's class is the first
# base, so that the class of a PyTorch scaler can be changed to this one (`integrations/accelerate.py`).
class GradScaler(torch.amp.GradScaler, Displayed):
    """Scales losses, unscales and checks gradients, and adapts the scale, like `torch.amp.GradScaler`.

    In addition, it reports the result of each step (`last_step`, `history`, `counters`), keeps the scale within limits,
    and raises an error when neither a lower scale nor the next batch can help. PyTorch's scaler keeps skipping steps.

    Args:
        device: Device type of the gradients. With ``"cuda"`` and no CUDA, the scaler warns and is off.
        init_scale: First scale, above 0. With ``2**16``, as in PyTorch, the first iterations skip steps until the scale
            suits the model. ``"auto"`` computes it from the first gradients, and waits for the device then.
        growth_factor: Factor by which the scale grows after `growth_interval` good iterations, above 1.
        backoff_factor: Factor for the scale after a skipped step, between 0 and 1.
        growth_interval: Good iterations in a row until the scale grows, at least 1.
        enabled: If False, `scale` returns its argument and `step` calls the optimizer's.
        reduce_found_inf: A `precast.Reduction`, or a function, that makes all processes skip
            the same steps. It is called whenever gradients of an optimizer are checked (in `unscale_` and in `step`)
            with a list of float32 tensors of shape (), one for each device, nonzero if a gradient there was not finite;
            during the search for a first scale also with the largest gradient. It replaces each value in place by the
            maximum over all processes. None: chosen by the optimizer's parameters.
        min_scale: Lower bound of the scale; at least ``2**-126``. None: ``2**-48``, or `init_scale` if lower.
        max_scale: Upper bound of the scale. None: float32's largest number.
        max_consecutive_skips: Number of skipped iterations in a row that counts as broken. None: no limit.
        max_nonfinite_losses: Allowed number of skipped iterations in a row with a loss that is not finite. None: as
            many as are needed to be certain that no lower scale helps.
        restore_buffers: Modules whose buffers a skipped step restores to their values before the iteration's first
            forward pass in training mode. Costs a copy of these buffers in each iteration.
        on_diagnosis: Reaction when `max_consecutive_skips` or `max_nonfinite_losses` is exceeded, or neither a lower
            scale nor the next batch can help (docs/scaler.md). ``"raise"`` raises a `BrokenModelError`, ``"warn"``
            warns, ``"ignore"`` does nothing.
        history: Number of steps in `history`.

    Raises:
        ScalerError: A setting is out of its range, or the device is unknown.

    Examples:
        >>> parameter = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = torch.optim.SGD([parameter], lr=0.5)
        >>> scaler = GradScaler("cpu", init_scale=1024.0)
        >>> scaler.scale(parameter * 3).backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> parameter.item()
        -0.5
        >>> scaler.last_step(optimizer).skipped
        False
    """

    def __init__(  # noqa: PLR0917 -- the signature is PyTorch's
        self,
        device: str = "cuda",
        init_scale: float | str = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        reduce_found_inf: Callable[[list[Tensor]], None] | None = None,
        min_scale: float | None = None,
        max_scale: float | None = None,
        max_consecutive_skips: int | None = None,
        max_nonfinite_losses: int | None = None,
        restore_buffers: nn.Module | Iterable[nn.Module] | None = None,
        on_diagnosis: OnDiagnosis = "raise",
        history: int = 100,
    ) -> None:
        arguments = dict(locals())
        self._device = settings.device_type_of(device)
        self._enabled = bool(enabled) and settings.is_usable(self._device)
        self._init_scale: Any = init_scale
        self._growth_factor, self._backoff_factor = growth_factor, backoff_factor
        self._growth_interval = growth_interval
        self._init_growth_tracker = 0
        self._limits = settings.DEFAULT_LIMITS
        self._search = next_scale.ScaleSearch(False)
        self._scale: Tensor | None = None
        self._growth_tracker: Tensor | None = None
        self._optimizer_states = PerOptimizerStates()
        self._iterations = 0
        if self._enabled:  # the settings of a disabled scaler may have any value
            self._search, arguments = next_scale.search_for(arguments)
            vars(self).update(settings.checked_attributes(arguments))
        self._step_history = StepHistory(int(history) if self._enabled else 0)
        self._checks = GradientChecks(reduce_found_inf)
        self._buffers = guarded(restore_buffers) if self._enabled else BufferGuard()

    @when_disabled(lambda outputs: outputs)
    def scale(self, outputs: T) -> T:
        """Multiply the floating-point tensors in `outputs`, in any nesting, by the scale.

        Args:
            outputs: A loss of any shape, or containers of losses; other tensors and leaves are returned unchanged.
                Iterators and sets become lazy ``map`` objects, as in PyTorch.

        Returns:
            The same structure; a product has the dtype of ``loss * float32_scalar``.

        Raises:
            ScalerError: `outputs` is not empty, and holds no tensor.
        """
        for listener in events.scaler_listeners:
            listener.on_scale(self)
        scale_on = functools.cache(self._scale_on)

        def scaled(loss: Tensor) -> Tensor:
            self._checks.keep_loss(loss)
            return loss * scale_on(loss.device)

        return map_losses(outputs, scaled, scale_later=self.scale)

    @when_disabled(lambda *_, **__: None)
    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of `optimizer` by the scale in place, to clip them before `step`.

        Gradients may have any dtype and layout: sparse, complex, `DTensor`. The quotient is computed in float32 and
        rounded once to the gradient's dtype. Float16 gradients below 6e-8 become 0, so keep parameters in float32.

        Raises:
            ScalerError: Called twice, or after `step`, in this iteration; nothing was scaled yet.
        """
        self._check_scale_growth_tracker("unscale_")
        state = self._state_of(optimizer)
        state.allow("unscale_")
        for listener in events.scaler_listeners:
            listener.on_unscale(self, optimizer)
        self._unscale(state)
        state.watch_for_backward()

    @when_disabled(lambda *_, **__: True)
    def is_unscaled(self, optimizer: Optimizer) -> bool:
        """Return True if the gradients of `optimizer` were unscaled in this iteration, or the scaler is disabled."""
        state = self._optimizer_states.get(id(optimizer))
        return state is not None and state.stage is OptState.UNSCALED

    @_torch.never_compiled
    def clip_grad_norm_(
        self,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Unscale the gradients of `optimizer`, if necessary, and clip their total norm.

        Args:
            optimizer: The optimizer of the gradients; call this after the last backward, and before `step`.
            max_norm: Maximum norm, in units of unscaled gradients.
            norm_type: Type of the norm: 2.0, 1.0, ``math.inf`` ...
            error_if_nonfinite: Raise an error if the norm is not finite; the step is skipped in any case.
            foreach: As for `torch.nn.utils.clip_grad_norm_`.

        Returns:
            The norm of the unscaled gradients before clipping, shape (); over all processes if the parameters are
            `DTensor`. Gradients that are not finite are not changed, so `last_step` can name the bad ones; PyTorch's
            clipping makes all of them NaN. Finite ones whose norm overflows become 0, as in PyTorch.
        """
        if not self.is_unscaled(optimizer):
            self.unscale_(optimizer)
        options = max_norm, norm_type, error_if_nonfinite, foreach
        state = self._optimizer_states.get(id(optimizer))
        return gradients.clipped(optimizer, *options, found_inf=state.found_inf if state else {})

    @when_disabled(lambda optimizer, *args, **kwargs: optimizer.step(*args, **kwargs))
    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Run ``optimizer.step(*args, **kwargs)`` on unscaled gradients if all are finite.

        A closure zeroes the gradients, computes a loss, calls ``scaler.scale(loss).backward()`` and returns the loss
        unscaled. If its gradients are not finite, parameters and the optimizer's state are restored. Only if the loss
        of a later call is not finite either, the optimizer gets that loss, because line searches rely on it.

        Returns:
            The result of the optimizer's step; None if it was skipped.

        Raises:
            ScalerError: A second step in this iteration; nothing was scaled yet; no parameter of `optimizer` has a
                gradient; backward ran between `unscale_` and `step`.
        """
        start = time.perf_counter()
        closure = closure_in(args, kwargs)
        if closure is None:
            self._check_scale_growth_tracker("step")
        state = self._state_of(optimizer)
        state.allow("step")
        for listener in events.scaler_listeners:
            listener.on_unscale(self, optimizer)
        if closure is not None:
            result, state.skipped = self._step_closure(state, closure, args, kwargs)
        elif _torch.handles_scaling(optimizer):
            result, state.skipped = self._step_on_device(state, args, kwargs)
        else:
            result, state.skipped = self._step_if_finite(state, args, kwargs)
        state["stage"] = OptState.STEPPED
        self._report_step(state, time.perf_counter() - start)
        return result

    @when_disabled(lambda *_, **__: None)
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """End the iteration: adapt the scale to the results of its steps, or set it to `new_scale`.

        Args:
            new_scale: A number between the limits, or a tensor of one element on the scaler's device type, clamped.

        Raises:
            BrokenModelError: Neither a lower scale nor the next batch can help; the scale is not changed.
            ScalerError: No gradients were checked in this iteration, or `new_scale` is not allowed.
        """
        scale, tracker = self._check_scale_growth_tracker("update")
        for listener in events.scaler_listeners:
            listener.on_update(self)
        states = list(self._optimizer_states.values())
        searching, measured = self._search.is_searching, self._measures()
        if new_scale is not None:
            new_scale = settings.new_scale_from(new_scale, self._device, self._limits)
            self._finish(states, 0, wait=measured)
            next_scale.set_scale(scale, new_scale, self._limits)
            return
        results = (state.found_inf for state in states)
        found_inf = gradients.total_found_inf(scale.device, results, "prior to update.")
        skipped = self._finish(states, 0 if searching else self._growth_interval, wait=measured)
        if not searching:
            growth, limits = self._growth_factor, self._limits
            backoff, interval = self._backoff_factor, self._growth_interval
            _torch.update_scale_(
                scale, tracker, found_inf, growth=growth, backoff=backoff, interval=interval
            )
            may_leave = growth < 1.0 or limits.max_scale < settings.LARGEST_SCALE
            if skipped is not False or may_leave:
                scale.clamp_(limits.min_scale, limits.max_scale)
        if measured:
            done, peaks = self._iterations - 1, [state.largest_gradient for state in states]
            best = self._search.after(done, float(scale), peaks, self._step_history, self._limits)
            next_scale.set_scale(scale, best, self._limits)

    @_torch.never_compiled
    def last_step(self, optimizer: Optimizer) -> StepEvent | None:
        """Return the latest step of `optimizer`; None before the first, and if the scaler is disabled."""
        return self._step_history.latest(optimizer)

    @property
    @_torch.never_compiled
    def history(self) -> Sequence[StepEvent]:
        """The latest steps of all optimizers, oldest first; at most as many as the argument `history`."""
        return tuple(self._step_history.events)

    @property
    @_torch.never_compiled
    def counters(self) -> Counters:
        """Counts of steps, skips, growths and backoffs; waits for fused optimizers."""
        self._diagnose(wait=True)
        return self._step_history.counters

    @_torch.never_compiled
    def advance(self, scheduler: Any) -> bool:
        """Call ``scheduler.step()`` if the latest step of its optimizer was not skipped.

        Args:
            scheduler: A scheduler of `torch.optim.lr_scheduler`; its attribute ``optimizer`` is the optimizer.

        Returns:
            True if the scheduler was advanced; waits for the device of a fused optimizer.
        """
        event = self.last_step(scheduler.optimizer)
        if event is not None and event.skipped:
            return False
        scheduler.step()
        return True

    @when_disabled(lambda: 1.0)
    def get_scale(self) -> float:
        """Return the current scale (waits for the device); 1.0 if the scaler is disabled."""
        return self._init_scale if self._scale is None else float(self._scale.item())

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the growth factor, above 0; 1.0 keeps the scale from growing."""
        self._growth_factor = settings.require_number("growth_factor", new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the backoff factor, above 0; 1.0 keeps the scale from shrinking."""
        self._backoff_factor = settings.require_number("backoff_factor", new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the number of good iterations until the scale grows, at least 1."""
        self._growth_interval = settings.require_count("growth_interval", new_interval)
        self._limit_tracker()

    @when_disabled(dict)
    def state_dict(self) -> dict[str, Any]:
        """Return five numbers, as PyTorch's scaler does, also if the scale is still searched; empty if disabled."""
        return {
            "scale": self.get_scale(),
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._get_growth_tracker(),
            **({state_dicts.SEARCHING: True} if self._search.is_searching else {}),
        }

    @when_disabled(lambda *_, **__: None)
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a scaler of this class, `torch.amp.GradScaler` or `ShardedGradScaler`.

        The empty state of a disabled scaler changes nothing, and a disabled scaler loads nothing. A scale outside the
        limits is moved to the nearest limit, with a warning.

        Raises:
            ScalerError: Entries are missing or have invalid values; then nothing has changed.
        """
        self._take_over(state_dicts.read(state_dict, self._limits))

    def __getstate__(self) -> dict[str, Any]:
        if self._optimizer_states:
            raise ScalerError(
                "a GradScaler was pickled or copied inside an iteration: do it after update()."
            )
        numbers = {  # instead of tensors: an unpickled scaler may start on another device
            "_init_scale": self.get_scale(),
            "_init_growth_tracker": self._get_growth_tracker(),
            "_scale": None,
            "_growth_tracker": None,
        }
        return {**self.__dict__, **(numbers if self._enabled else {})}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled or copied scaler of this class or of PyTorch's."""
        if "_optimizer_states" in state:
            vars(self).update(state)
            self._optimizer_states, self._buffers = PerOptimizerStates(), BufferGuard()
        else:
            GradScaler.__init__(self, state["_device"], enabled=False)
            if state["_enabled"]:
                self._enabled, self._step_history = True, StepHistory(_HISTORY)
                self.load_state_dict(state_dicts.of_pytorchs(state))

    # The names up to the next comment are those of torch.amp.GradScaler: optimizers with their own scaling call them,
    # libraries read them, and fine-tuning scripts replace `_unscale_grads_`.

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> FoundInf:
        return gradients.unscaled(optimizer, inv_scale, found_inf, allow_fp16)

    def _check_inf_per_device(self, optimizer: Optimizer) -> FoundInf:  # type: ignore[override]
        scale, _ = self._check_scale_growth_tracker("step")
        state = self._state_of(optimizer)
        state.scale = scale.clone()
        found_inf = self._check(state)
        if state.largest_gradient is not None and state.stage is OptState.READY:
            state.largest_gradient /= scale
        return found_inf

    @property  # type: ignore[override]
    def _per_optimizer_states(self) -> PerOptimizerStates:
        return self._optimizer_states

    @_per_optimizer_states.setter
    def _per_optimizer_states(self, states: Any) -> None:
        self._optimizer_states = PerOptimizerStates()
        for key, state in states.items():
            self._optimizer_states[key] = state

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        if self._scale is None or self._growth_tracker is None:
            raise ScalerError(
                f"{funcname}() was called before any loss was scaled: there is nothing to divide by. "
                "Write scaler.scale(loss).backward() instead of loss.backward()."
            )
        return self._scale, self._growth_tracker

    # The names below are precast's.

    def _take_over(self, state: tuple[dict[str, Any], bool] | None) -> None:
        """Replace the attributes by those of a state; None changes nothing."""
        if state is None:
            return
        attributes, is_searching = state
        vars(self).update(attributes)
        history = self._step_history
        history.resume(self._init_growth_tracker)
        self._search = next_scale.ScaleSearch(is_searching, history.counters.backoffs)
        if self._scale is not None and self._growth_tracker is not None:
            self._scale.fill_(self._init_scale)
            self._growth_tracker.fill_(self._init_growth_tracker)
        self._limit_tracker()

    def _limit_tracker(self) -> None:
        """Keep the tracker below the interval: PyTorch compares them by ``==`` to grow the scale."""
        most = self._growth_interval - 1
        self._step_history.good_iterations = min(self._step_history.good_iterations, most)
        self._init_growth_tracker = min(self._init_growth_tracker, most)
        if self._growth_tracker is not None:
            self._growth_tracker.clamp_(max=min(most, settings.MOST_TRACKED))

    @_torch.never_compiled
    def _card(self) -> Card:
        scale = self._init_scale if self._scale is None else self._scale
        history = self._step_history if self._enabled else None
        return card(self._device, scale, history, searching=self._search.is_searching)

    def _scale_on(self, device: torch.device) -> Tensor:
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(device)
        return moved(self._check_scale_growth_tracker("scale")[0], device)

    def _state_of(self, optimizer: Optimizer) -> OptimizerState:
        state = self._optimizer_states.setdefault(id(optimizer), OptimizerState(optimizer))
        state.optimizer = optimizer
        return state

    def _unscale(self, state: OptimizerState) -> None:
        scale, _ = self._check_scale_growth_tracker("unscale_")
        inverse, state.scale = gradients.reciprocal(scale)
        self._check(state, inverse)
        if state.found_inf:  # else there were no gradients; later ones are still scaled
            state["stage"] = OptState.UNSCALED

    def _check(self, state: OptimizerState, inverse: Tensor | None = None) -> FoundInf:
        """Check the gradients of an optimizer, after multiplying them by `inverse` if it is not None."""
        only_checks, unscale, measure = inverse is None, self._unscale_grads_, self._measures()
        if inverse is None:
            inverse = torch.ones_like(self._check_scale_growth_tracker("step")[0])
        return self._checks.check(state, inverse, unscale, allow_fp16=only_checks, measure=measure)

    def _step_if_finite(self, state: OptimizerState, args: Any, kwargs: Any) -> Result:
        if state.stage is OptState.READY:
            state.is_stepping = True
            self.unscale_(state.optimizer)
        else:  # the program may have written to the gradients since unscale_
            self._check(state)
        if self._checks.is_bad(state):
            return None, True
        return state.optimizer.step(*args, **kwargs), False

    def _step_on_device(self, state: OptimizerState, args: Any, kwargs: Any) -> Result:
        """Pass scale and found_inf as tensors to a fused optimizer, which decides on the device without waiting."""
        optimizer = state.optimizer
        scale, _ = self._check_scale_growth_tracker("step")
        if takes_scaler(optimizer):
            result = step_given_scaler(self, optimizer, args, kwargs)
            return result, gradients.found_inf_so_far(scale, state.found_inf)
        prepare_fused_step(optimizer)
        grad_scale = getattr(optimizer, "grad_scale", None)  # the user's own divisor
        if state.stage is OptState.READY:
            self._check_inf_per_device(optimizer)
            grad_scale = scale if grad_scale is None else scale * grad_scale
        else:  # the program may have written to the gradients since unscale_
            self._check(state)
        found_inf = gradients.found_inf_so_far(scale, state.found_inf)
        with temporary_attributes(optimizer, grad_scale=grad_scale, found_inf=found_inf):
            return optimizer.step(*args, **kwargs), found_inf

    def _step_closure(self, state: OptimizerState, closure: Any, args: Any, kwargs: Any) -> Result:
        state.allow("closure")
        try:
            return step_with_closure(state, closure, args, kwargs, self._unscale, self._checks)
        except BaseException:  # the step was undone, so it may be tried again
            self._optimizer_states.pop(id(state.optimizer), None)
            raise

    def _report_step(self, state: OptimizerState, seconds: float) -> None:
        assert state.skipped is not None
        scale = state.scale_of_gradients(self._check_scale_growth_tracker("step")[0])
        number = list(self._optimizer_states).index(id(state.optimizer))
        details, step = (
            self._checks.details_of(state),
            events.after_step(state.optimizer, self._iterations),
        )
        event = StepEvent(number, step, scale, state.skipped, seconds, details)
        self._step_history.add(state.optimizer, event)
        for witness in tuple(events.witnesses):
            witness.on_step(state.optimizer, event)
        events.emit(event)

    def _finish(self, states: list[OptimizerState], interval: int, wait: bool) -> bool | None:
        """Record and diagnose the iteration. Return True if it was skipped, None if only the device knows."""
        checked = [state for state in states if state.found_inf]
        skip_flags = [state.skipped for state in checked]
        on_host = any(skip_flags) if all(isinstance(each, bool) for each in skip_flags) else None
        current, _ = self._check_scale_growth_tracker("update")
        if checked:
            scale, flags = checked[0].scale_of_gradients(current), (s.found_inf for s in checked)
            skipped = gradients.total_found_inf(scale.device, flags) if on_host is None else on_host
            self._buffers.end_iteration(skipped)
        if checked and not _torch.is_captured(current):
            self._step_history.end_iteration(self._iterations, scale, skipped, interval)
        else:
            self._step_history.discard_iteration()
        self._optimizer_states.clear()
        self._checks.forget_losses()
        self._iterations += 1
        if not _torch.is_captured(current):
            self._diagnose(wait)
        return on_host

    def _diagnose(self, wait: bool) -> None:
        """Diagnose the iterations whose results are on the host; with `wait`, all of them."""
        try:
            for diagnosis in diagnoses(self._step_history, self._limits, wait):
                act_on(diagnosis, self._limits.on_diagnosis)
        except BrokenModelError:
            self._check_scale_growth_tracker("update")[1].zero_()  # as after any skipped iteration
            raise

    def _measures(self) -> bool:
        """Return True if the gradients of this iteration are measured."""
        measures = self._search.measures(self._iterations, self._growth_interval)
        return measures and not (self._scale is not None and _torch.is_captured(self._scale))
