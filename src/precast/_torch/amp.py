"""PyTorch's own mixed precision: the count of open regions, fused operations of scalers, and the state of a scaler.

Invariants:

- nothing here waits for the device.
"""

from __future__ import annotations

import math
from typing import Final

import torch

from precast._torch.tensors import is_dtensor

__all__ = [
    "autocast_nesting",
    "check_and_unscale_",
    "float32_norms",
    "found_inf_tensors",
    "fused_sgd_writes",
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


def float32_norms(tensors: list[torch.Tensor], order: float) -> list[torch.Tensor]:
    """Return the norm of each tensor, float32, shape (): one pass and no wait.

    No public function computes the norms of many tensors at once (2.13). That of a sharded tensor is sharded.
    """
    if any(map(is_dtensor, tensors)):
        return [torch.linalg.vector_norm(each, order, dtype=torch.float32) for each in tensors]
    return list(torch._foreach_norm(tensors, order, dtype=torch.float32))


def check_and_unscale_(
    gradients: list[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor
) -> None:
    """Multiply gradients of one device and dtype in place, and set `found_inf` to 1.0 if one is not finite.

    The check is before the product, which is computed in float32 and rounded once. Nothing waits for the device. The
    kernel does both, as no public function does; that of CUDA does not take bfloat16 (2.13).
    """
    kind = gradients[0].device.type, gradients[0].dtype
    if kind not in _kinds_without_kernel:
        try:
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inverse_scale)
        except RuntimeError as error:
            if kind[1] is not torch.bfloat16 or "not implemented for" not in str(error):
                raise
            _kinds_without_kernel.add(kind)  # it has not written to any gradient
        else:
            return
    _check_and_unscale_apart_(gradients, found_inf, inverse_scale)


def fused_sgd_writes(dtype: torch.dtype) -> bool:
    """Return True if the fused kernel of SGD on the CPU writes parameters of a dtype; that for 16 bits does not (2.13).

    The kernel is called without an optimizer, which could have hooks.
    """
    weight, gradient = torch.ones(64, dtype=dtype), torch.ones(64, dtype=dtype)
    torch._fused_sgd_(
        [weight],
        [gradient],
        [],
        weight_decay=0.0,
        momentum=0.0,
        lr=1.0,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=True,
    )
    return not weight.any()


_kinds_without_kernel: Final[set[tuple[str, torch.dtype]]] = set()
"""Device types and dtypes whose fused kernel does not exist."""


def _check_and_unscale_apart_(
    gradients: list[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor
) -> None:
    """Do the same as the kernel, with other operations.

    The kernel for float32 checks the largest absolute value of each gradient, which is NaN if one value is. A product
    with a float32 tensor that has dimensions is computed in float32; a tensor without any would be rounded to the
    gradient's dtype first.
    """
    gradients = [gradient for gradient in gradients if gradient.numel()]
    if not gradients:
        return
    largest = torch.stack(torch._foreach_norm(gradients, math.inf)).float()
    torch._amp_foreach_non_finite_check_and_unscale_([largest], found_inf, inverse_scale)
    factors = [
        inverse_scale.reshape(()) if gradient.dim() == 0 else inverse_scale.reshape(1)
        for gradient in gradients
    ]
    torch._foreach_mul_(gradients, factors)


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
