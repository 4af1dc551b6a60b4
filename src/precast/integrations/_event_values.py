"""What the observers of this folder tell of an event: names and values for charts, and the words of a skipped step."""

from __future__ import annotations

from typing import Any

from precast._internal.events import StepEvent

__all__ = ["health_values", "skipped_words", "step_values"]


def step_values(event: StepEvent, prefix: str) -> dict[str, float]:
    """The scale at a scaler's step, whether the step was skipped (0 or 1), and how many seconds it took."""
    name = f"{prefix}/optimizer {event.optimizer}"
    return {
        f"{prefix}/scale": float(event.scale),
        f"{name}/skipped": int(bool(event.skipped)),
        f"{name}/seconds": event.seconds,
    }


def skipped_words(event: StepEvent) -> tuple[str, str]:
    """The parameters whose gradients were not finite, and what else is known of a skipped step."""
    loss = "" if event.loss_finite else "; the loss was not finite either"
    began = f". {event.first.message}" if event.first else ""
    return ", ".join(event.names) or "unknown", f"{loss}{began}"


def health_values(tensor: dict[str, Any]) -> dict[str, float | None]:
    """The figures of a tensor of a `HealthEvent`; None for a maximum or a root mean square of no finite number."""
    elements = max(tensor["elements"], 1)
    counts = {"zero": "zeros", "subnormal": "subnormal", "infinite": "overflow", "nan": "nan"}
    if tensor["underflow_known"]:
        counts["lost"] = "underflow_zeros"
    figures = {
        **{figure: tensor[figure] for figure in ("maximum", "rms")},
        **{share: tensor[key] / elements for share, key in counts.items()},
    }
    name = f"{tensor['kind']} {tensor['name'] or 'model'}"
    return {f"health/{figure}/{name}": value for figure, value in figures.items()}
