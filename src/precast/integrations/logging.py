"""An observer for `precast.observe` that writes events to Python's `logging`.

Invariant: the scale of a step that was not skipped is read only if its level is logged.
"""

from __future__ import annotations

import logging
from typing import Any

from precast._internal.events import HealthEvent, OperationNote, ScalerDiagnosis, StepEvent
from precast.integrations._event_values import skipped_words

__all__ = ["LogEvents"]


class LogEvents:
    """Logs a line for each event: steps as DEBUG, skipped steps as WARNING, diagnoses as ERROR, notes as INFO.

    Each log record has the event as its attribute ``event``, for handlers that need more than text. If DEBUG is off,
    the only cost of a step is the check whether it was skipped, which for a fused optimizer waits for the device.

    Args:
        logger: The logger for the lines; None for the logger "precast".

    Use it as an observer of the thread that trains:

        logging.basicConfig(level=logging.INFO)
        with precast.observe(LogEvents()):
            train()
    """

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logging.getLogger("precast") if logger is None else logger

    def __call__(self, event: object) -> None:
        """Log a `StepEvent`, a `ScalerDiagnosis`, a `HealthEvent` or an `OperationNote`."""
        level = _level(event)
        if level is not None and self._logger.isEnabledFor(level):
            self._logger.log(level, "%s", _text(event), extra={"event": event})


def _level(event: object) -> int | None:
    match event:
        case StepEvent():
            return logging.WARNING if event.skipped else logging.DEBUG
        case ScalerDiagnosis():
            return logging.ERROR
        case OperationNote():
            return logging.INFO
        case HealthEvent():
            return logging.DEBUG
    return None


def _text(event: Any) -> str:
    match event:
        case HealthEvent():
            return f"step {event.step}: the monitor counted {len(event.tensors)} tensors"
        case OperationNote():
            return f"{event.op} on {event.device_type}: {event.message}"
        case ScalerDiagnosis():
            return event.message
    scale = f"{float(event.scale):g}"
    step = f"step {event.step} of optimizer {event.optimizer} was"
    if not event.skipped:
        return f"{step} done at scale {scale}"
    names, rest = skipped_words(event)
    return f"{step} skipped at scale {scale}: gradients of {names} were not finite{rest}"
