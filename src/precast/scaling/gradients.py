"""Gradients of every kind: grouped, checked and unscaled in place, and looked at where one is bad.

What is unscaled is the *memory* of a gradient: its values if it is sparse, its real and imaginary
parts if it is complex, this process's part if it is a `DTensor`. The product with the inverse scale
is computed in float32 (float64 for float64) and rounded once to the gradient's dtype. So a float16
gradient keeps what float16 can say of the unscaled number: below 6e-8 that is zero.

Invariants: nothing waits for a device but for copies to the CPU, `bad_gradients` and `largest`.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from precast import _torch
from precast.errors import PrecastWarning

__all__ = [
    "Verdicts",
    "bad_gradients",
    "clipped",
    "largest",
    "local",
    "moved",
    "reciprocal",
    "unscaled",
]

Verdicts = dict[torch.device, Tensor]
"""For each device with gradients a float32 tensor of shape (): nonzero if one was not finite."""

_FLOAT16 = (
    "gradients are float16: unscaled, those below 6e-8 become zero, which is what the scale was to "
    "prevent. Keep parameters in float32 (model.float()), and let autocast lower the computation."
)
_PLAIN = frozenset({torch.float32, torch.float64, torch.bfloat16})


def reciprocal(scale: Tensor) -> tuple[Tensor, Tensor]:
    """``1 / scale`` correctly rounded, by way of float64 where the device has it; and a copy of the scale."""
    if scale.is_mps:
        return scale.reciprocal(), scale.clone()
    copy = scale.double()
    return copy.reciprocal().float(), copy


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`; waits only for a copy to the CPU, which could be read too early."""
    if tensor.device == device:
        return tensor
    return tensor.to(device, non_blocking=device.type != "cpu")


@torch.no_grad()
def unscaled(
    optimizer: Optimizer, inverse: Tensor, found_inf: Tensor, allow_fp16: bool
) -> Verdicts:
    """Multiplies all gradients by `inverse` in place; verdicts begin as copies of `found_inf`."""
    verdicts: Verdicts = {}
    for (device, dtype), group in _gradients(optimizer).items():
        if dtype is torch.float16 and not allow_fp16:
            warnings.warn(_FLOAT16, PrecastWarning, stacklevel=6)
        if device not in verdicts:
            verdicts[device] = moved(found_inf, device).clone()
        _torch.check_and_unscale_(group, verdicts[device], moved(inverse, device))
    return verdicts


@torch.no_grad()
def bad_gradients(optimizer: Optimizer) -> Iterator[tuple[int, int, Tensor]]:
    """Group, place in it, and parameter of each gradient that is not finite; waits for the device."""
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if parameter.grad is None:
                continue
            memory = _memory(parameter)
            # A sum of finite numbers can overflow; then, and only then, each number is looked at.
            if not bool(memory.sum().isfinite()) and not bool(memory.isfinite().all()):
                yield number, place, parameter


@torch.no_grad()
def largest(optimizer: Optimizer, like: Tensor) -> Tensor:
    """The largest absolute value in all gradients, shape (), float32 beside `like`; 0 where there are none."""
    peaks = [
        moved(peak.float(), like.device)
        for group in _gradients(optimizer).values()
        for memory in group
        if memory.numel()
        for peak in torch.aminmax(memory)
    ]
    return torch.stack(peaks).abs().amax() if peaks else torch.zeros_like(like)


@torch.no_grad()
def clipped(
    parameters: list[Tensor],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
    *,
    verdicts: Verdicts,
) -> Tensor:
    """The norm of all gradients, which are clipped to `max_norm` where they are finite; waits for nothing."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm: Any = torch.nn.utils.get_total_norm(gradients, norm_type, error_if_nonfinite, foreach)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    bad = norm.isnan()
    for verdict in verdicts.values():
        bad = bad | (moved(verdict, norm.device) != 0)
    used = torch.where(bad, 0.0, norm)  # of finite gradients it may be infinite: then they become 0
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, used, foreach)
    total: Tensor = norm
    return total


def local(tensor: Tensor) -> Tensor:
    """This process's part of a `DTensor`; any other tensor itself."""
    if not _torch.is_dtensor(tensor):
        return tensor
    part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part


def _gradients(optimizer: Optimizer) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """The memory of all gradients of an optimizer's parameters, by device and dtype."""
    groups: dict[Any, list[Tensor]] = defaultdict(list)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            if (
                type(gradient) is not Tensor
                or gradient.dtype not in _PLAIN
                or gradient.layout is not torch.strided
            ):
                gradient = _memory(parameter)
            groups[gradient.device, gradient.dtype].append(gradient)
    return groups


def _memory(parameter: Tensor) -> Tensor:
    """A gradient's numbers, as a real and dense tensor that shares its memory.

    Sparse float16 gradients are summed first (and replaced): the sum is what can overflow.
    """
    assert parameter.grad is not None
    gradient = local(parameter.grad)
    if gradient.is_sparse:
        if gradient.dtype is torch.float16 and not gradient.is_coalesced():
            gradient = parameter.grad = gradient.coalesce()
        gradient = _torch.sparse_values(gradient)
    elif gradient.layout is not torch.strided:
        gradient = gradient.values()
    if gradient.is_complex():
        if gradient.is_conj():
            gradient = parameter.grad = gradient.resolve_conj()
        gradient = torch.view_as_real(gradient)
    return gradient
