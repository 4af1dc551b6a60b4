"""Functions on gradients of every kind: unscale and check in place, clip, and find values that are not finite.

Unscaling writes to the *memory* of a gradient (`memory_of`). The product with the inverse scale is computed in float32
(float64 for float64) and rounded once to the gradient's dtype. So float16 gradients below 6e-8 become zero.

Invariant: only copies to the CPU, `bad_gradients`, `bad_parameters` and `largest` wait for a device.
"""

from __future__ import annotations

import functools
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from precast import _torch
from precast._internal import cures
from precast._internal.callers import callers_level
from precast.errors import PrecastWarning, ScalerError
from precast.grad_scaler.memory import are_finite, is_finite, memory_of, moved
from precast.optim.partial_steps import parameters_of
from precast.optim.shards import part_of
from precast.optim.total_norm import clip_to_norm, total_norm

__all__ = [
    "FoundInf",
    "Place",
    "bad_gradients",
    "bad_parameters",
    "clipped",
    "found_inf_so_far",
    "largest",
    "reciprocal",
    "total_found_inf",
    "unscaled",
]

FoundInf = dict[torch.device, Tensor]
"""Maps each device with gradients to a float32 tensor of shape (): nonzero if a gradient there was not finite."""

Place = tuple[int, int, Tensor]
"""A parameter of an optimizer: the number of its group, its place in the group, the parameter."""

_FLOAT16 = (
    "gradients are float16: unscaled, those below 6e-8 become zero, so the scale has no effect for "
    "them. "
)
_OTHER_PARAMETERS = (
    "Their parameters are {dtype}: give them gradients of that dtype (`parameter.grad_dtype`, or "
    "in the code that assigns `.grad`)."
)
_PLAIN: Final = frozenset({torch.float32, torch.float64, torch.bfloat16})
"""Dtypes of dense gradients that can be unscaled directly and need no warning."""


def reciprocal(scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``1 / scale``, correctly rounded (computed in float64 where supported), and a copy of the scale."""
    if scale.is_mps:
        return scale.reciprocal(), scale.clone()
    copy = scale.double()
    return copy.reciprocal().float(), copy


@torch.no_grad()
def unscaled(
    optimizer: Optimizer, inverse: Tensor, found_inf: Tensor, allow_fp16: bool
) -> FoundInf:
    """Multiply all gradients of an optimizer by `inverse` in place, and check them.

    Return for each device with gradients a copy of `found_inf`, the result of earlier checks, set to 1.0 if a gradient
    there was not finite. Float16 gradients give a warning unless `allow_fp16` is True.
    """
    results: FoundInf = {}
    for (device, dtype), memories in _by_kind(optimizer).items():
        if dtype is torch.float16 and not allow_fp16:
            warnings.warn(_float16_warning(optimizer), PrecastWarning, stacklevel=callers_level())
        if device not in results:
            results[device] = moved(found_inf, device).clone()
        _torch.check_and_unscale_(memories, results[device], moved(inverse, device))
    return results


def total_found_inf(
    device: torch.device | None, each: Iterable[FoundInf], where: str = "for this optimizer."
) -> Tensor:
    """Add up the results of several optimizers on `device`; None: on the first device with a result."""
    flags = [flag for one in each for flag in one.values()]
    if flags:
        to = device or flags[0].device
        return functools.reduce(torch.add, (moved(flag, to) for flag in flags))
    raise ScalerError(
        f"No inf checks were recorded {where} "  # PyTorch's message, which programs search for
        "That is, no gradients were checked in this iteration: no parameter of the optimizer has one, or "
        "step() was not called. Call scale(loss).backward(), step(optimizer), then update(); leave "
        "an optimizer out whose parameters took no part in the loss."
    )


def found_inf_so_far(scale: Tensor, found_inf: FoundInf) -> Tensor:
    """Return the sum of the results of one optimizer, on the scale's device; zero if nothing was checked yet."""
    return total_found_inf(scale.device, [found_inf]) if found_inf else torch.zeros_like(scale)


@torch.no_grad()
def bad_gradients(optimizer: Optimizer) -> Iterator[Place]:
    """Yield the parameters with gradients that are not finite; wait for the device."""
    for number, place, parameter in _places(optimizer):
        if parameter.grad is not None and not are_finite(_gradient_memory(parameter)):
            yield number, place, parameter


@torch.no_grad()
def bad_parameters(optimizer: Optimizer) -> Iterator[Place]:
    """Yield the parameters that are not finite themselves; wait for the device."""
    for number, place, parameter in _places(optimizer):
        if not is_finite(parameter):
            yield number, place, parameter


@torch.no_grad()
def largest(optimizer: Optimizer, like: Tensor) -> Tensor:
    """Return the largest absolute value in all gradients, float32, shape (), on the device of `like`; 0 if none."""
    peaks = [
        moved(peak.float(), like.device)
        for memories in _by_kind(optimizer).values()
        for memory in memories
        if memory.numel()
        for peak in torch.aminmax(memory)
    ]
    return torch.stack(peaks).abs().amax() if peaks else torch.zeros_like(like)


@torch.no_grad()
def clipped(
    optimizer: Optimizer,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
    *,
    found_inf: FoundInf,
) -> Tensor:
    """Return the norm of all gradients; clip them to `max_norm` if they are finite. Does not wait for the device."""
    parameters = parameters_of(optimizer)
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = total_norm(gradients, norm_type, error_if_nonfinite, foreach)
    bad = norm.isnan()
    for flag in found_inf.values():
        bad = bad | (moved(flag, norm.device) != 0)
    divisor = torch.where(bad, 0.0, norm)  # finite gradients with an infinite norm become 0
    clip_to_norm(parameters, max_norm, divisor, foreach)
    return norm


def _places(optimizer: Optimizer) -> Iterator[Place]:
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            yield number, place, parameter


def _float16_warning(optimizer: Optimizer) -> str:
    pairs = [(p, p.grad) for p in parameters_of(optimizer) if p.grad is not None]
    dtypes = {str(p.dtype) for p, gradient in pairs if gradient.dtype is torch.float16}
    others = sorted(dtypes - {"torch.float16"})
    return _FLOAT16 + (
        _OTHER_PARAMETERS.format(dtype=others[0]) if others else cures.FLOAT32_PARAMETERS.text
    )


def _by_kind(optimizer: Optimizer) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """Return the memory of all gradients of an optimizer by device and dtype."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for parameter in parameters_of(optimizer):
        gradient = parameter.grad
        if gradient is None:
            continue
        is_strided = type(gradient) is Tensor and gradient.layout is torch.strided
        if not is_strided or gradient.dtype not in _PLAIN:
            gradient = _gradient_memory(parameter)
        kinds[gradient.device, gradient.dtype].append(gradient)
    return kinds


def _gradient_memory(parameter: Tensor) -> Tensor:
    """Return the memory of a parameter's gradient; replace gradients first that cannot be checked or written in place.

    Duplicate indices of a sparse float16 gradient are summed, because the sum can overflow. A pending conjugation is
    carried out, because the memory holds the values only afterwards.
    """
    assert parameter.grad is not None
    gradient = part_of(parameter.grad)
    if gradient.is_sparse and gradient.dtype is torch.float16 and not gradient.is_coalesced():
        gradient = parameter.grad = gradient.coalesce()
    if gradient.is_complex() and gradient.is_conj():
        gradient = parameter.grad = gradient.resolve_conj()
    return memory_of(gradient)
