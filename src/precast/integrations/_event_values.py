"""Values of events for charts, and the text of a skipped step, shared by the observers in this folder."""

from __future__ import annotations

from typing import Any

from precast._internal.events import StepEvent

__all__ = ["health_values", "skipped_words", "step_values"]


def step_values(event: StepEvent, prefix: str) -> dict[str, float]:
    """Return the scale at a scaler's step, 1 if the step was skipped (else 0), and its seconds."""
    name = f"{prefix}/optimizer {event.optimizer}"
    return {
        f"{prefix}/scale": float(event.scale),
        f"{name}/skipped": int(bool(event.skipped)),
        f"{name}/seconds": event.seconds,
    }


def skipped_words(event: StepEvent) -> tuple[str, str]:
    """Return the parameters with bad gradients in a skipped step, and the other details as text."""
    loss = "" if event.loss_finite else "; the loss was not finite either"
    origin = f". {event.first.message}" if event.first else ""
    return ", ".join(event.names) or "unknown", f"{loss}{origin}"


def health_values(tensor: dict[str, Any]) -> dict[str, float | None]:
    """Return the figures of a tensor of a `HealthEvent`; None for a maximum or rms without finite values."""
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
