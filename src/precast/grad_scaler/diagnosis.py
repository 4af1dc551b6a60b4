"""The diagnosis of a broken run: neither a lower scale nor the next batch can end its skipped steps.

One of these conditions holds for the latest skipped iterations in a row:

- ``weights``: in the last 3 the loss was not finite before it was scaled, and parameters hold infinity or NaN, or
  buffers of their model hold NaN. The loss does not depend on the scale, and a skipped step changes no parameter.
- ``loss``: in the last 40 the loss was not finite before it was scaled, and the scale is 2**-14 or lower, or did not
  fall in these 40. A bad loss alone is no proof: if it overflows in float16, gradients at a lower scale may be finite.
- ``floor``: in the last 40 the scale did not fall, because it is at its floor or was set by hand.
- ``skips``, and ``loss`` earlier than that: a limit set by the user was exceeded.

Invariants: tensors are read only for skipped iterations; the values are the same in all processes that combine their
results.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Final, Literal

from precast._internal import cures
from precast._internal.callers import callers_level
from precast._internal.events import ScalerDiagnosis, StepEvent, emit, witnesses
from precast.errors import BrokenModelError, PrecastWarning
from precast.grad_scaler.settings import LOW_SCALE, Limits, OnDiagnosis
from precast.grad_scaler.step_history import Iteration, StepHistory

__all__ = ["act_on", "diagnoses"]

Reason = Literal["weights", "loss", "floor", "skips"]

_SHOWN: Final = 5  # names and scales in a message
_SURE_OF_PARAMETERS: Final = 3
_SURE: Final = 40
"""After this many skipped iterations in a row no good batch is expected; after fewer, one may still come."""

_CAUSES = {
    "weights": f"The parameters themselves hold infinity or NaN: {{weights}}. {cures.BROKEN_PARAMETERS.text}",
    "buffers": f"Buffers of the model hold NaN: {{weights}}. {cures.BROKEN_BUFFERS.text}",
    "loss": (
        "The loss itself was infinite or NaN before it was scaled, in {bad_losses} skipped iterations in a row; no "
        f"scale changes the loss. {cures.BAD_LOSSES.text}"
    ),
    "floor": (
        "The scale has not fallen in {stuck} skipped iterations in a row: it is {scale:g}, and min_scale is "
        f"{{floor:g}}. {cures.STUCK_SCALE.text}"
    ),
    "skips": (
        "That is {count} skipped iterations in a row, the limit that max_consecutive_skips sets. "
        f"{cures.MANY_SKIPS.text}"
    ),
}


def diagnoses(history: StepHistory, limits: Limits, wait: bool) -> Iterator[ScalerDiagnosis]:
    """Close open iterations of `history`, and yield their diagnoses.

    `wait` also closes iterations that only the device has decided, and waits for them.
    """
    for iteration in history.close(wait):
        reason = _reason(iteration, history, limits)
        if reason is not None:
            yield _diagnosis(reason, iteration, history, limits)


def act_on(diagnosis: ScalerDiagnosis, on_diagnosis: OnDiagnosis) -> None:
    """Report a diagnosis to observers and witnesses, then raise or warn according to `on_diagnosis`."""
    emit(diagnosis)
    for witness in tuple(witnesses):
        witness.on_diagnosis(diagnosis)
    if on_diagnosis == "raise":
        raise BrokenModelError(diagnosis.message, diagnosis)
    if on_diagnosis == "warn":
        warnings.warn(diagnosis.message, PrecastWarning, stacklevel=callers_level())


def _reason(iteration: Iteration, history: StepHistory, limits: Limits) -> Reason | None:
    """Return the reason why neither a lower scale nor the next batch can help; None if one of them may."""
    bad_losses, most_losses = history.bad_losses, limits.max_nonfinite_losses
    most_skips = limits.max_consecutive_skips
    is_stuck = history.stuck >= _SURE
    if bad_losses >= _SURE_OF_PARAMETERS and any(
        event.details.parameters or event.details.buffers for event in _skipped(iteration)
    ):
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
    skipped = _skipped(iteration)
    names = tuple(_name(iteration, event, name) for event in skipped for name in event.names)
    broken = skipped if reason == "weights" else []
    weights = [
        _name(iteration, event, name) for event in broken for name in event.details.parameters
    ]
    buffers = [name for event in broken for name in event.details.buffers]
    first = next(filter(None, (event.first for event in skipped)), None)
    count, scale = history.counters.consecutive_skips, float(iteration.scale)
    cause = _CAUSES["buffers" if buffers and not weights else reason].format(
        bad_losses=history.bad_losses,
        count=count,
        floor=limits.min_scale,
        scale=scale,
        stuck=history.stuck,
        weights=_listed(weights or list(dict.fromkeys(buffers))),
    )
    # `step` is the iteration's number, unless a tracker counts the steps of the process.
    step = skipped[0].step if skipped else iteration.number
    which = "iteration" if step == iteration.number else "step"
    like = f", like the {count - 1} before it" if count > 1 else ""
    gradients = f"the gradients of {_listed(names)}" if names else "gradients"
    scales = ", ".join(f"{float(event.scale):g}" for event in list(history.events)[-_SHOWN:])
    origin = f"{first.message} " if first else ""
    message = (
        f"{which} {step} was skipped{like}: {gradients} were not finite at scale {scale:g} "
        f"(scales of the latest steps: {scales}). {_changed(iteration)} {origin}{cause} "
        "on_diagnosis='warn' or 'ignore' continues skipping."
    )
    return ScalerDiagnosis(reason, step, scale, names, message, first)


def _skipped(iteration: Iteration) -> list[StepEvent]:
    return [event for event in iteration.events if event.skipped]


def _changed(iteration: Iteration) -> str:
    """Return a sentence on the parameters of the optimizers that the scaler stepped in the iteration."""
    stepped = [str(event.optimizer) for event in iteration.events if not event.skipped]
    if not stepped:
        return "The skipped step changed no parameter."
    which = f"optimizer {stepped[0]}" if len(stepped) == 1 else f"optimizers {', '.join(stepped)}"
    return f"The skipped step changed no parameter; {which} of the same iteration took the step."


def _name(iteration: Iteration, event: StepEvent, name: str) -> str:
    """Return the name of a parameter in an event; with its optimizer if the iteration had several."""
    return f"optimizer {event.optimizer}: {name}" if len(iteration.events) > 1 else name


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(f"`{name}`" for name in names[:_SHOWN]) + more
