"""PyTorch's own mixed precision: the count of open regions, fused operations of scalers, and the state of a scaler.

Invariants:

- nothing here waits for the device.
"""

from __future__ import annotations

import torch

__all__ = [
    "autocast_nesting",
    "check_and_unscale_",
    "found_inf_tensors",
    "replaces_nesting",
    "scale_of",
    "update_scale_",
]


def autocast_nesting() -> int:
    """Return the number of regions, PyTorch's and precast's, that this thread is in; PyTorch can only change it (2.13).

    `torch._C` has the functions as they were before a trace replaces them.
    """
    torch._C.autocast_increment_nesting()
    return torch._C.autocast_decrement_nesting()


def replaces_nesting() -> bool:
    """Return True if the functions that count open regions are not PyTorch's own, as in an open trace (2.13)."""
    return (
        torch.autocast_increment_nesting is not torch._C.autocast_increment_nesting
        or torch.autocast_decrement_nesting is not torch._C.autocast_decrement_nesting
    )


def check_and_unscale_(
    gradients: list[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor
) -> None:
    """Multiply gradients of one device and dtype in place, and set `found_inf` to 1.0 if one is not finite.

    One fused operation that does not wait for the device; no public function does both (2.13).
    """
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inverse_scale)


def update_scale_(
    scale: torch.Tensor,
    growth_tracker: torch.Tensor,
    found_inf: torch.Tensor,
    *,
    growth: float,
    backoff: float,
    interval: int,
) -> None:
    """Adapt the scale and its growth tracker in place on their device, without reading `found_inf` (2.13)."""
    torch._amp_update_scale_(scale, growth_tracker, found_inf, growth, backoff, interval)


def scale_of(scaler: torch.amp.GradScaler) -> torch.Tensor | None:
    """Return a copy of a scaler's scale without waiting for the device; None before its first loss (2.13)."""
    scale = scaler._get_scale_async()
    return None if scale is None else scale.clone()


def found_inf_tensors(scaler: torch.amp.GradScaler, optimizer: object) -> list[torch.Tensor]:
    """Return the `found_inf` tensors of PyTorch's scaler in this iteration, one per device (2.13)."""
    state = scaler._per_optimizer_states.get(id(optimizer), {})
    return list(state.get("found_inf_per_device", {}).values())
