"""What a monitor is asked for, checked."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from precast.errors import MonitorError

__all__ = ["check"]


def check(model: Any, every: Any, keep: Any, scaler: Any) -> None:
    """Refuses what `monitor` cannot be given.

    Raises:
        MonitorError: as `monitor` says.
    """
    if not isinstance(model, nn.Module):
        raise MonitorError(
            f"monitor(model) got {type(model).__name__}. It takes a torch.nn.Module: the model, or a part of it."
        )
    for name, value, least in (("every", every, 1), ("keep", keep, 2)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise MonitorError(
                f"monitor({name}={value!r}): give a whole number of steps, at least {least}."
            )
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise MonitorError(
            f"monitor(scaler=...) got {type(scaler).__name__}. It takes a torch.amp.GradScaler; a precast.GradScaler "
            "need not be given."
        )
