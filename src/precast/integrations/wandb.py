"""Logs what a gradient scaler did, and what a monitor counted, to Weights & Biases: an observer for `precast.observe`.

Needs the package wandb, or a run of your own.

Invariants: a run that was given stays open; no value is written under a step number of W&B's, which only grows, so the
program may log values of its own in between.
"""

from __future__ import annotations

from typing import Any

from precast._internal.events import HealthEvent, ScalerDiagnosis, StepEvent
from precast._internal.missing import missing_extra
from precast.integrations._event_values import health_values, step_values

__all__ = ["WandB"]


class WandB:
    """Logs values of each step, an alert for each verdict, and figures of each tensor that a monitor counts.

    The charts are drawn over ``<prefix>/step``, the scaler's iteration, and ``health/step``, the monitor's step. Of
    each step the scale is logged, and for each optimizer whether the step was skipped and how many seconds it took.

    Reading a step's scale waits for the device, so every step waits while it is observed.

    Args:
        run: What `wandb.init` returned, or anything with `log`, `define_metric` and `alert`; None takes the run of this
            process, and begins one where there is none.
        prefix: Before the names of all values of the scaler.

    Raises:
        MissingExtraError: No run was given, and wandb is not installed.

    Use it as an observer of the thread that trains:

        run = wandb.init(project="mine")
        with precast.observe(WandB(run)):
            train()
    """

    def __init__(self, run: Any = None, prefix: str = "scaler") -> None:
        self._run = _current() if run is None else run
        self._prefix = prefix
        for each in (prefix, "health"):
            self._run.define_metric(f"{each}/step")
            self._run.define_metric(f"{each}/*", step_metric=f"{each}/step")

    def __call__(self, event: object) -> None:
        """Logs a `StepEvent`, a `ScalerDiagnosis` or a `HealthEvent`; leaves out other events."""
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


def _current() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise missing_extra("WandB() without a run", "wandb", "wandb") from error
    return wandb.run if wandb.run is not None else wandb.init()
