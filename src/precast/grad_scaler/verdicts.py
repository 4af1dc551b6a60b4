"""Tells 'the model is broken' from all that a lower scale or the next batch mends, and says so.

A verdict is given when one of these holds for the skipped iterations in a row that end with the latest:

- ``weights``: in the last three the loss was not finite before it was scaled, and there are infinity or NaN in the
  parameters. The loss does not depend on the scale, and no step that is skipped mends a parameter.
- ``loss``: in the last forty the loss was not finite before it was scaled, and the scale is 2**-14 or lower, or did not
  fall in forty. A bad loss alone says nothing: where it overflows in float16, gradients at a lower scale may be finite.
- ``floor``: in the last forty the scale did not fall, because it is at its floor or was set by hand.
- ``skips``, and ``loss`` earlier than that: a limit that the user set was passed.

Invariants: nothing is read here but for an iteration that was skipped; what is read is the same in all processes that
reduce what they find.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Final, Literal

from precast._internal.callers import callers_level
from precast._internal.events import ScalerDiagnosis, StepEvent, emit, witnesses
from precast.errors import BrokenModelError, PrecastWarning
from precast.grad_scaler.ledger import Iteration, Ledger
from precast.grad_scaler.settings import LOW_SCALE, Limits

__all__ = ["judge", "verdict_of"]

Reason = Literal["weights", "loss", "floor", "skips"]

_SHOWN: Final = 5  # names, and scales, in a message
_SURE_OF_WEIGHTS: Final = 3
_SURE: Final = 40
"""Skipped iterations in a row: one bad batch, or several, may be followed by a good one."""

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


def judge(iteration: Iteration, ledger: Ledger, limits: Limits) -> None:
    """Acts on an iteration that was closed just now, as `limits.on_verdict` says.

    Raises:
        BrokenModelError: there is a verdict, and `on_verdict` is ``"raise"``.
    """
    verdict = verdict_of(iteration, ledger, limits)
    if verdict is None:
        return
    emit(verdict)
    for witness in tuple(witnesses):
        witness.judged(verdict)
    if limits.on_verdict == "raise":
        raise BrokenModelError(verdict.message, verdict)
    if limits.on_verdict == "warn":
        warnings.warn(verdict.message, PrecastWarning, stacklevel=callers_level())


def verdict_of(iteration: Iteration, ledger: Ledger, limits: Limits) -> ScalerDiagnosis | None:
    """The verdict on an iteration that was closed just now; None where a lower scale or the next batch may help."""
    if not ledger.counters.consecutive_skips:
        return None
    reason = _reason(iteration, ledger, limits)
    return None if reason is None else _verdict(reason, iteration, ledger, limits)


def _reason(iteration: Iteration, ledger: Ledger, limits: Limits) -> Reason | None:
    bad_losses, most_losses = ledger.bad_losses, limits.max_nonfinite_losses
    most_skips = limits.max_consecutive_skips
    is_stuck = ledger.stuck >= _SURE
    if bad_losses >= _SURE_OF_WEIGHTS and any(_skipped_weights(iteration)):
        return "weights"
    if most_losses is not None and bad_losses > most_losses:
        return "loss"
    if bad_losses >= _SURE and (is_stuck or float(iteration.scale) <= LOW_SCALE):
        return "loss"
    if is_stuck:
        return "floor"
    if most_skips is not None and ledger.counters.consecutive_skips >= most_skips:
        return "skips"
    return None


def _verdict(
    reason: Reason, iteration: Iteration, ledger: Ledger, limits: Limits
) -> ScalerDiagnosis:
    names = tuple(_skipped_names(iteration))
    firsts = (event.first for event in iteration.events if event.skipped)
    first = next(filter(None, firsts), None)
    began = f"{first.message} " if first else ""
    count, scale = ledger.counters.consecutive_skips, float(iteration.scale)
    scales = ", ".join(f"{value:g}" for value in _scales(ledger.history))
    like = f", like the {count - 1} before it" if count > 1 else ""
    cause = _CAUSES[reason].format(
        bad_losses=ledger.bad_losses,
        count=count,
        floor=limits.min_scale,
        scale=scale,
        stuck=ledger.stuck,
        weights=_listed(tuple(_skipped_weights(iteration))) if reason == "weights" else "",
    )
    gradients = f"the gradients of {_listed(names)}" if names else "gradients"
    message = (
        f"iteration {iteration.number} was skipped{like}: "
        f"{gradients} were not finite at scale {scale:g} (scales of the latest steps: {scales}). "
        f"{_changed(iteration)} {began}{cause} on_verdict='warn' or 'ignore' goes on skipping."
    )
    return ScalerDiagnosis(reason, iteration.number, scale, names, message, first)


def _changed(iteration: Iteration) -> str:
    """What the iteration did to parameters: the scaler knows of the optimizers that it stepped."""
    stepped = [str(event.optimizer) for event in iteration.events if not event.skipped]
    if not stepped:
        return "The skipped step changed no parameter."
    which = f"optimizer {stepped[0]}" if len(stepped) == 1 else f"optimizers {', '.join(stepped)}"
    return f"The skipped step changed no parameter; {which} of the same iteration took the step."


def _skipped_names(iteration: Iteration) -> Iterator[str]:
    """The parameters with bad gradients, said with their optimizer where the iteration had several."""
    return (_of(iteration, e, name) for e in iteration.events if e.skipped for name in e.names)


def _skipped_weights(iteration: Iteration) -> Iterator[str]:
    """The same of parameters that are bad themselves."""
    skipped = (event for event in iteration.events if event.skipped)
    return (_of(iteration, event, name) for event in skipped for name in event.findings.weights)


def _of(iteration: Iteration, event: StepEvent, name: str) -> str:
    return f"optimizer {event.optimizer}: {name}" if len(iteration.events) > 1 else name


def _scales(history: Iterable[StepEvent]) -> list[float]:
    return [float(event.scale) for event in list(history)[-_SHOWN:]]


def _listed(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(f"`{name}`" for name in names[:_SHOWN]) + more
