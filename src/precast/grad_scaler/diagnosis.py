"""The diagnosis that a run is broken: neither a lower scale nor the next batch can end its skipped steps.

There is a diagnosis if one of these holds for the skipped iterations in a row that end with the latest:

- ``weights``: in the last 3 the loss was not finite before it was scaled, and parameters hold infinity or NaN. The loss
  does not depend on the scale, and a skipped step changes no parameter.
- ``loss``: in the last 40 the loss was not finite before it was scaled, and the scale is 2**-14 or lower, or did not
  fall in these 40. A bad loss alone says nothing: if it overflows in float16, gradients at a lower scale may be finite.
- ``floor``: in the last 40 the scale did not fall, because it is at its floor or was set by hand.
- ``skips``, and ``loss`` earlier than that: a limit that the user set was passed.

Invariants: tensors are read only for iterations that were skipped; what is read is the same in all processes that
combine what they find.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Final, Literal

from precast._internal.callers import callers_level
from precast._internal.events import ScalerDiagnosis, StepEvent, emit, witnesses
from precast.errors import BrokenModelError, PrecastWarning
from precast.grad_scaler.settings import LOW_SCALE, Limits, OnVerdict
from precast.grad_scaler.step_history import Iteration, StepHistory

__all__ = ["diagnose", "diagnose_closed"]

Reason = Literal["weights", "loss", "floor", "skips"]

_SHOWN: Final = 5  # how many names, and how many scales, a message has
_SURE_OF_PARAMETERS: Final = 3
_SURE: Final = 40
"""After so many skipped iterations in a row no good batch is expected any more; after a few, one may still come."""

_CAUSES = {
    "weights": (
        "The parameters themselves hold infinity or NaN: {weights}. Load a checkpoint from before; then look at the "
        "learning rate, and at what writes to the parameters."
    ),
    "loss": (
        "The loss itself was infinite or NaN before it was scaled, in {bad_losses} skipped iterations in a row; no "
        "scale changes the loss. Look at the batches, at the learning rate, and at log, sqrt and division in the loss."
    ),
    "floor": (
        "The scale has not fallen in {stuck} skipped iterations in a row: it is {scale:g}, and min_scale is {floor:g}. "
        "Look at NaN in these gradients, and at the learning rate. If gradients this large are meant, lower min_scale "
        "or let the scale fall."
    ),
    "skips": (
        "That is {count} skipped iterations in a row, the limit that max_consecutive_skips sets. Look at NaN in these "
        "parameters or in the data; raise the limit, or begin with a lower init_scale, if the scale simply takes this "
        "long to fall."
    ),
}


def diagnose_closed(history: StepHistory, limits: Limits, wait: bool) -> None:
    """Closes open iterations; of what is diagnosed, observers and witnesses are told, then `on_verdict` is carried out.

    Args:
        history: Whose open iterations.
        limits: What the user allows, and what is to happen.
        wait: Whether to wait for iterations of which only the device knows whether they were skipped.

    Raises:
        BrokenModelError: There is a diagnosis, and `on_verdict` is ``"raise"``.
    """
    for iteration in history.close(wait):
        diagnosis = diagnose(iteration, history, limits)
        if diagnosis is not None:
            _act_on(diagnosis, limits.on_verdict)


def diagnose(iteration: Iteration, history: StepHistory, limits: Limits) -> ScalerDiagnosis | None:
    """The diagnosis of an iteration that was closed just now; None if a lower scale or the next batch may help."""
    if not history.counters.consecutive_skips:
        return None
    reason = _reason(iteration, history, limits)
    return None if reason is None else _diagnosis(reason, iteration, history, limits)


def _act_on(diagnosis: ScalerDiagnosis, on_verdict: OnVerdict) -> None:
    emit(diagnosis)
    for witness in tuple(witnesses):
        witness.judged(diagnosis)
    if on_verdict == "raise":
        raise BrokenModelError(diagnosis.message, diagnosis)
    if on_verdict == "warn":
        warnings.warn(diagnosis.message, PrecastWarning, stacklevel=callers_level())


def _reason(iteration: Iteration, history: StepHistory, limits: Limits) -> Reason | None:
    bad_losses, most_losses = history.bad_losses, limits.max_nonfinite_losses
    most_skips = limits.max_consecutive_skips
    is_stuck = history.stuck >= _SURE
    if bad_losses >= _SURE_OF_PARAMETERS and any(_bad_parameters(iteration)):
        return "weights"
    if most_losses is not None and bad_losses > most_losses:
        return "loss"
    if bad_losses >= _SURE and (is_stuck or float(iteration.scale) <= LOW_SCALE):
        return "loss"
    if is_stuck:
        return "floor"
    if most_skips is not None and history.counters.consecutive_skips >= most_skips:
        return "skips"
    return None


def _diagnosis(
    reason: Reason, iteration: Iteration, history: StepHistory, limits: Limits
) -> ScalerDiagnosis:
    names = tuple(_bad_gradients(iteration))
    firsts = (event.first for event in iteration.events if event.skipped)
    first = next(filter(None, firsts), None)
    began = f"{first.message} " if first else ""
    count, scale = history.counters.consecutive_skips, float(iteration.scale)
    scales = ", ".join(f"{value:g}" for value in _latest_scales(history))
    like = f", like the {count - 1} before it" if count > 1 else ""
    cause = _CAUSES[reason].format(
        bad_losses=history.bad_losses,
        count=count,
        floor=limits.min_scale,
        scale=scale,
        stuck=history.stuck,
        weights=_listed(tuple(_bad_parameters(iteration))) if reason == "weights" else "",
    )
    gradients = f"the gradients of {_listed(names)}" if names else "gradients"
    # A step's number is the iteration's, but where a tracker counts the steps of the process.
    step = next((e.step for e in iteration.events if e.skipped), iteration.number)
    which = "iteration" if step == iteration.number else "step"
    message = (
        f"{which} {step} was skipped{like}: "
        f"{gradients} were not finite at scale {scale:g} (scales of the latest steps: {scales}). "
        f"{_changed(iteration)} {began}{cause} on_verdict='warn' or 'ignore' goes on skipping."
    )
    return ScalerDiagnosis(reason, step, scale, names, message, first)


def _changed(iteration: Iteration) -> str:
    """A sentence on what the iteration did to the parameters of the optimizers that the scaler stepped."""
    stepped = [str(event.optimizer) for event in iteration.events if not event.skipped]
    if not stepped:
        return "The skipped step changed no parameter."
    which = f"optimizer {stepped[0]}" if len(stepped) == 1 else f"optimizers {', '.join(stepped)}"
    return f"The skipped step changed no parameter; {which} of the same iteration took the step."


def _bad_gradients(iteration: Iteration) -> Iterator[str]:
    """The parameters whose gradients were not finite, with their optimizer if the iteration had several."""
    return (_of(iteration, e, name) for e in iteration.events if e.skipped for name in e.names)


def _bad_parameters(iteration: Iteration) -> Iterator[str]:
    """The parameters that are not finite themselves, in the same words."""
    skipped = (event for event in iteration.events if event.skipped)
    return (_of(iteration, event, name) for event in skipped for name in event.details.parameters)


def _of(iteration: Iteration, event: StepEvent, name: str) -> str:
    return f"optimizer {event.optimizer}: {name}" if len(iteration.events) > 1 else name


def _latest_scales(history: StepHistory) -> list[float]:
    return [float(event.scale) for event in list(history.events)[-_SHOWN:]]


def _listed(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(f"`{name}`" for name in names[:_SHOWN]) + more
