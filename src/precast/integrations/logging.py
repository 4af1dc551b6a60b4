"""Says what a gradient scaler did in Python's `logging`: an observer for `precast.observe`.

Needs nothing but Python. Invariant: a step that was not skipped is looked at only where somebody listens to its level.
"""

from __future__ import annotations

import logging

from precast._internal.events import HealthEvent, OperationNote, ScalerDiagnosis, StepEvent

__all__ = ["LogEvents"]


class LogEvents:
    """A line for each event: steps as DEBUG, skipped ones as WARNING, verdicts as ERROR, notes of the engine as INFO.

    A line has the event as its attribute ``event``, for handlers that write more than text. Where DEBUG is off, a step
    that was not skipped costs no more than the question whether it was, which waits for a fused optimizer's device.

    Args:
        logger: Where to; None is the logger "precast".

    Use it as an observer of the thread that trains:

        logging.basicConfig(level=logging.INFO)
        with precast.observe(LogEvents()):
            train()
    """

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logging.getLogger("precast") if logger is None else logger

    def __call__(self, event: object) -> None:
        """Logs a `StepEvent`, a `ScalerDiagnosis`, a `HealthEvent` or an `OperationNote`."""
        level = _level(event)
        if level is not None and self._logger.isEnabledFor(level):
            self._logger.log(level, "%s", _text(event), extra={"event": event})


def _level(event: object) -> int | None:
    if isinstance(event, StepEvent):
        return logging.WARNING if event.skipped else logging.DEBUG
    if isinstance(event, ScalerDiagnosis):
        return logging.ERROR
    if isinstance(event, OperationNote):
        return logging.INFO
    return logging.DEBUG if isinstance(event, HealthEvent) else None


def _text(event: object) -> str:
    if isinstance(event, StepEvent):
        return _of_step(event)
    if isinstance(event, HealthEvent):
        return f"step {event.step}: the monitor counted {len(event.tensors)} tensors"
    if isinstance(event, OperationNote):
        return f"{event.op} on {event.device}: {event.message}"
    assert isinstance(event, ScalerDiagnosis)
    return event.message


def _of_step(event: StepEvent) -> str:
    what = f"step {event.step} of optimizer {event.optimizer}"
    if not event.skipped:
        return f"{what} was done at scale {float(event.scale):g}"
    loss = "" if event.loss_finite else "; the loss was not finite either"
    began = f". {event.first.message}" if event.first else ""
    names = ", ".join(event.names) or "unknown"
    return f"{what} was skipped at scale {float(event.scale):g}: gradients of {names} were not finite{loss}{began}"
