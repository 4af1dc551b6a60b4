"""Logs the steps of a gradient scaler and the counts of a monitor to Weights & Biases: an observer for `observe`.

Invariants: the run stays open; values are logged without W&B's own step number, which can only grow,
so the program may log its own values in between.
"""

from __future__ import annotations

from typing import Any

from precast._internal.events import HealthEvent, ScalerDiagnosis, StepEvent
from precast.integrations._event_values import health_values, step_values

__all__ = ["WandB"]


class WandB:
    """Logs values of each step, an alert for each diagnosis, and figures of each tensor that a monitor counts.

    The charts are drawn over ``<prefix>/step``, the scaler's iteration, and ``health/step``, the monitor's step. Each
    step logs the scale, and for each optimizer 1 if the step was skipped (else 0) and the step's seconds.

    Reading a step's scale waits for the device, so every step waits while it is observed.

    Args:
        run: The result of `wandb.init`, or any object with `log`, `define_metric` and `alert`.
        prefix: Prefix of the names of all values of the scaler.

    Use it as an observer of the thread that trains:

        run = wandb.init(project="mine")
        with precast.observe(WandB(run)):
            train()
    """

    def __init__(self, run: Any, prefix: str = "scaler") -> None:
        self._run = run
        self._prefix = prefix
        for each in (prefix, "health"):
            self._run.define_metric(f"{each}/step")
            self._run.define_metric(f"{each}/*", step_metric=f"{each}/step")

    def __call__(self, event: object) -> None:
        """Log a `StepEvent`, a `ScalerDiagnosis` or a `HealthEvent`; ignore other events."""
        values: dict[str, Any]
        if isinstance(event, StepEvent):
            values = {f"{self._prefix}/step": event.step, **step_values(event, self._prefix)}
            if event.skipped:
                name = f"{self._prefix}/optimizer {event.optimizer}/not finite"
                values[name] = len(event.names)
            self._run.log(values)
        elif isinstance(event, ScalerDiagnosis):
            self._run.alert(title="precast: no lower scale helps", text=event.message)
        elif isinstance(event, HealthEvent):
            values = {"health/step": event.step}
            for tensor in event.tensors:
                values |= health_values(tensor)
            self._run.log(values)
