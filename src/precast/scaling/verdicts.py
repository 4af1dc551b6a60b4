"""Tells 'the scale is too high' from 'the model is broken', and says so.

A lower scale mends gradients that overflowed because they were multiplied by it. It mends nothing
where the loss was infinite or NaN before it was scaled, nor where gradients overflow at the floor,
nor where nothing has helped for long. Those are verdicts.

Invariants: nothing is read here but for an iteration that was skipped.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from precast.errors import BrokenModelError, PrecastWarning
from precast.events import StepEvent, Verdict, emit, witnesses
from precast.scaling.ledger import Iteration, Ledger
from precast.scaling.settings import Limits

__all__ = ["judge", "verdict_of"]

_SHOWN = 5  # names, and scales, in a message

_CAUSES = {
    "loss": (
        "The loss itself was infinite or NaN before it was scaled, so the scale is not the cause. "
        "Look at this batch, at the learning rate, and at log, sqrt and division in the loss."
    ),
    "floor": (
        "The scale is at its floor, {floor:g}: gradients overflow that are hardly scaled any more. "
        "Look at these parameters' modules, at the learning rate, and at NaN in the weights; lower "
        "min_scale only if gradients this large are meant."
    ),
    "skips": (
        "That is {count} skipped iterations in a row, and lowering the scale did not help. "
        "Look at NaN in these parameters or in the data; raise max_consecutive_skips, or begin with "
        "a lower init_scale, if the search simply takes this long."
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
        warnings.warn(verdict.message, PrecastWarning, stacklevel=4)


def verdict_of(iteration: Iteration, ledger: Ledger, limits: Limits) -> Verdict | None:
    """The verdict on an iteration that was closed just now; None where a lower scale or the next batch may help."""
    if not ledger.counters.consecutive_skips:
        return None
    scale = float(iteration.scale)
    if ledger.bad_losses > limits.max_nonfinite_losses:
        return _verdict("loss", iteration, scale, ledger, limits)
    if scale <= limits.min_scale:
        return _verdict("floor", iteration, scale, ledger, limits)
    if ledger.counters.consecutive_skips >= limits.max_consecutive_skips:
        return _verdict("skips", iteration, scale, ledger, limits)
    return None


def _verdict(
    reason: str, iteration: Iteration, scale: float, ledger: Ledger, limits: Limits
) -> Verdict:
    names = tuple(name for event in iteration.events if event.skipped for name in event.names)
    firsts = (event.first for event in iteration.events if event.skipped)
    first = next(filter(None, firsts), None)
    began = f"{first.message} " if first else ""
    count = ledger.counters.consecutive_skips
    scales = ", ".join(f"{value:g}" for value in _scales(ledger.history))
    like = f", like the {count - 1} before it" if count > 1 else ""
    message = (
        f"iteration {iteration.number} was skipped{like}: "
        f"{_listed(names)} not finite at scale {scale:g} (scales of the latest steps: {scales}). "
        f"No parameter was changed. {began}{_CAUSES[reason].format(floor=limits.min_scale, count=count)} "
        "on_verdict='warn' or 'ignore' goes on skipping."
    )
    return Verdict(reason, iteration.number, scale, names, message, first)  # type: ignore[arg-type]


def _scales(history: Iterable[StepEvent]) -> list[float]:
    return [float(event.scale) for event in list(history)[-_SHOWN:]]


def _listed(names: tuple[str, ...]) -> str:
    if not names:
        return "gradients were"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    shown = ", ".join(f"`{name}`" for name in names[:_SHOWN])
    return f"the gradients of {shown}{more} were"
