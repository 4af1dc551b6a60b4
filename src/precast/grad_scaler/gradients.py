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
from precast._internal.callers import callers_level
from precast.errors import PrecastWarning
from precast.weights.low_precision_gradients import factors_of

__all__ = [
    "Place",
    "Verdicts",
    "bad_gradients",
    "bad_weights",
    "clipped",
    "is_finite",
    "largest",
    "local",
    "moved",
    "reciprocal",
    "unscaled",
]

Verdicts = dict[torch.device, Tensor]
"""For each device with gradients a float32 tensor of shape (): nonzero if one was not finite."""

Place = tuple[int, int, Tensor]
"""A parameter of an optimizer: the number of its group, its place there, itself."""

_FLOAT16 = (
    "gradients are float16: unscaled, those below 6e-8 become zero, which is what the scale was to "
    "prevent. "
)
_OF_FLOAT16 = "Keep parameters in float32 (model.float()), and let autocast lower the computation."
_OF_OTHERS = (
    "Their parameters are {dtype}: let them have gradients of that dtype (`parameter.grad_dtype`, or "
    "what assigns `.grad`)."
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
    for (device, dtype, later), group in _gradients(optimizer).items():
        if dtype is torch.float16 and not allow_fp16 and later is None:
            warnings.warn(_why_float16(optimizer), PrecastWarning, stacklevel=callers_level())
        if device not in verdicts:
            verdicts[device] = moved(found_inf, device).clone()
        by = inverse if later is None else torch.ones_like(inverse)
        _torch.check_and_unscale_(group, verdicts[device], moved(by, device))
    return verdicts


@torch.no_grad()
def bad_gradients(optimizer: Optimizer) -> Iterator[Place]:
    """Where gradients are not finite; waits for the device."""
    for number, place, parameter in _places(optimizer):
        if parameter.grad is not None and not _all_finite(_memory(parameter)):
            yield number, place, parameter


@torch.no_grad()
def bad_weights(optimizer: Optimizer) -> Iterator[Place]:
    """Where parameters are not finite themselves; waits for the device."""
    for number, place, parameter in _places(optimizer):
        if not is_finite(parameter):
            yield number, place, parameter


def _places(optimizer: Optimizer) -> Iterator[Place]:
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            yield number, place, parameter


def _all_finite(numbers: Tensor) -> bool:
    """Whether they are: their sum may overflow, then, and only then, each is looked at."""
    return bool(numbers.sum().isfinite()) or bool(numbers.isfinite().all())


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor of any kind holds neither infinity nor NaN, in this process's part; waits for the device."""
    return _all_finite(_numbers(local(tensor.detach())))


@torch.no_grad()
def largest(optimizer: Optimizer, like: Tensor) -> Tensor:
    """The largest absolute value in all gradients, shape (), float32 beside `like`; 0 where there are none."""
    peaks = [
        moved(peak.float(), like.device) * (1.0 if later is None else moved(later, like.device))
        for (_, _, later), group in _gradients(optimizer).items()
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


def _why_float16(optimizer: Optimizer) -> str:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    of = {p.dtype for p in parameters if p.grad is not None and p.grad.dtype is torch.float16}
    others = sorted(str(dtype) for dtype in of - {torch.float16})
    return _FLOAT16 + (_OF_OTHERS.format(dtype=others[0]) if others else _OF_FLOAT16)


def local(tensor: Tensor) -> Tensor:
    """This process's part of a `DTensor`; any other tensor itself."""
    if not _torch.is_dtensor(tensor):
        return tensor
    part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part


_Kind = tuple[torch.device, torch.dtype, Tensor | None]


def _gradients(optimizer: Optimizer) -> dict[_Kind, list[Tensor]]:
    """The memory of all gradients of an optimizer, by device, dtype, and what they are multiplied by later."""
    groups: dict[Any, list[Tensor]] = defaultdict(list)
    factors = factors_of(optimizer)
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
            groups[gradient.device, gradient.dtype, factors.get(id(parameter))].append(gradient)
    return groups


def _memory(parameter: Tensor) -> Tensor:
    """A gradient's numbers, as a real and dense tensor that shares its memory.

    Sparse float16 gradients are summed first (and replaced): the sum is what can overflow.
    """
    assert parameter.grad is not None
    gradient = local(parameter.grad)
    if gradient.is_sparse and gradient.dtype is torch.float16 and not gradient.is_coalesced():
        gradient = parameter.grad = gradient.coalesce()
    if gradient.is_complex() and gradient.is_conj():
        gradient = parameter.grad = gradient.resolve_conj()
    return _numbers(gradient)


def _numbers(tensor: Tensor) -> Tensor:
    """The numbers of a tensor of any layout and dtype, as a real and dense one."""
    if tensor.is_sparse:
        tensor = _torch.sparse_values(tensor)
    elif tensor.layout is not torch.strided:
        tensor = tensor.values()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
