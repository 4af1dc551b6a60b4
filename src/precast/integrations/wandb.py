"""Logs what a gradient scaler did, and what a monitor counted, to Weights & Biases: an observer for `precast.observe`.

Needs the package wandb, or a run of your own. Invariants: a run that was given stays open; no value is written under a
step number of W&B's, which only grows, so the program may log what it likes in between.
"""

from __future__ import annotations

from typing import Any

from precast._internal.events import HealthEvent, ScalerDiagnosis, StepEvent
from precast._internal.missing import missing_extra

__all__ = ["WandB"]


class WandB:
    """Values of each step, an alert for verdicts; of a monitor, figures of each tensor.

    The charts are drawn over ``<prefix>/step``, the scaler's iteration, and ``health/step``, the monitor's step. Of
    each step there are the scale, and by optimizer whether it was skipped and how many seconds it took.

    Reading a step's scale waits for the device, so every step waits while it is observed.

    Args:
        run: what `wandb.init` returned, or anything with `log`, `define_metric` and `alert`; None takes the run of this
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
        """Logs a `StepEvent`, a `ScalerDiagnosis` or a `HealthEvent`; other events are none of its business."""
        if isinstance(event, StepEvent):
            self._run.log(self._of_step(event))
        elif isinstance(event, ScalerDiagnosis):
            self._run.alert(title="precast: no lower scale helps", text=event.message)
        elif isinstance(event, HealthEvent):
            values = {name: value for each in event.tensors for name, value in _figures(each)}
            self._run.log({"health/step": event.step, **values})

    def _of_step(self, event: StepEvent) -> dict[str, Any]:
        name, skipped = f"{self._prefix}/optimizer {event.optimizer}", bool(event.skipped)
        values = {
            f"{self._prefix}/step": event.step,
            f"{self._prefix}/scale": float(event.scale),
            f"{name}/skipped": int(skipped),
            f"{name}/seconds": event.seconds,
        }
        return {**values, f"{name}/not finite": len(event.names)} if skipped else values


def _figures(tensor: dict[str, Any]) -> list[tuple[str, Any]]:
    name = f"{tensor['kind']} {tensor['name'] or 'model'}"
    elements = max(tensor["elements"], 1)
    shares = {"zero": "zeros", "subnormal": "subnormal", "infinite": "overflow", "nan": "nan"}
    if tensor["underflow_known"]:
        shares["lost"] = "underflow_zeros"
    return [
        *((f"health/{figure}/{name}", tensor[figure]) for figure in ("maximum", "rms")),
        *((f"health/{figure}/{name}", tensor[key] / elements) for figure, key in shares.items()),
    ]


def _current() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise missing_extra("WandB() without a run", "wandb", "wandb") from error
    return wandb.run if wandb.run is not None else wandb.init()
