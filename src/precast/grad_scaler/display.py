"""The display of a scaler: its scale, the number of skipped steps, and its latest steps.

Invariants: displaying a scaler diagnoses nothing and looks up no names. It waits for a value on a device, unless a CUDA
graph is being captured, which must not wait.
"""

from __future__ import annotations

from torch import Tensor

from precast import _torch
from precast._internal.display import Card, plural
from precast._internal.events import StepEvent
from precast.grad_scaler.step_history import StepHistory

__all__ = ["card", "scale_text"]

_COLUMNS = ("step", "scale", "outcome", "parameters whose gradients were not finite")


def card(
    device: str, scale: float | Tensor, history: StepHistory | None, *, searching: bool
) -> Card:
    """Return the card of a scaler; a disabled one has no history."""
    title = f"GradScaler on {device}"
    if history is None:
        return Card(title, ["off"])
    counters = history.counters
    facts = [
        f"scale {scale_text(scale)}",
        plural(counters.steps, "step"),
        f"{counters.skipped:,} skipped",
    ]
    if searching:
        facts.append("searching for the first scale")
    rows = [_row(event) for event in reversed(history.events)]
    return Card(title, facts, _COLUMNS, rows, "earlier steps")


def scale_text(scale: float | Tensor) -> str:
    """Return all digits of a whole number, six digits of another."""
    if isinstance(scale, Tensor):
        if _torch.is_captured(scale):
            return "on the device"
        scale = float(scale)
    return f"{int(scale):,}" if scale.is_integer() and scale < 2.0**53 else f"{scale:.6g}"


def _row(event: StepEvent) -> tuple[object, ...]:
    if isinstance(event.skipped, Tensor) and _torch.is_captured(event.skipped):
        return event.step, "on the device", None, None
    names = ", ".join(event.names) if event.skipped is True else None
    outcome = "skipped" if bool(event.skipped) else "stepped"
    return event.step, scale_text(event.scale), outcome, names
