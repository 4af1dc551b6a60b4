"""Gradients of every kind: checked and unscaled in place, clipped, and searched for those that are not finite.

What is unscaled is the *memory* of a gradient (`memory_of`). The product with the inverse scale is computed in float32
(float64 for float64) and rounded once to the gradient's dtype. So a float16 gradient keeps what float16 can say of the
unscaled number: below 6e-8 that is zero.

Invariants: nothing waits for a device but copies to the CPU, `bad_gradients`, `bad_parameters` and `largest`.
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
from precast.grad_scaler.memory import are_finite, is_finite, local, memory_of, moved
from precast.optim.partial_steps import parameters_of
from precast.optim.total_norm import total_norm

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
"""For each device with gradients a float32 tensor of shape (): nonzero if a gradient there was not finite."""

Place = tuple[int, int, Tensor]
"""A parameter of an optimizer: the number of its group, its place there, itself."""

_FLOAT16 = (
    "gradients are float16: unscaled, those below 6e-8 become zero, which is what the scale was to "
    "prevent. "
)
_OF_OTHERS = (
    "Their parameters are {dtype}: let them have gradients of that dtype (`parameter.grad_dtype`, or "
    "what assigns `.grad`)."
)
_PLAIN: Final = frozenset({torch.float32, torch.float64, torch.bfloat16})
"""Dtypes whose dense gradients are their own memory and need no warning."""


def reciprocal(scale: Tensor) -> tuple[Tensor, Tensor]:
    """``1 / scale`` correctly rounded, by way of float64 where the device has it; and a copy of the scale."""
    if scale.is_mps:
        return scale.reciprocal(), scale.clone()
    copy = scale.double()
    return copy.reciprocal().float(), copy


@torch.no_grad()
def unscaled(
    optimizer: Optimizer, inverse: Tensor, found_inf: Tensor, allow_fp16: bool
) -> FoundInf:
    """Multiplies all gradients of an optimizer by `inverse` in place, and checks them.

    Float16 gradients give a warning unless `allow_fp16` is True.

    Returns:
        For each device with gradients a copy of `found_inf`, which says what was found before; it is 1.0 if a gradient
        on this device was not finite.
    """
    found: FoundInf = {}
    for (device, dtype), memories in _by_kind(optimizer).items():
        if dtype is torch.float16 and not allow_fp16:
            warnings.warn(_why_float16(optimizer), PrecastWarning, stacklevel=callers_level())
        if device not in found:
            found[device] = moved(found_inf, device).clone()
        _torch.check_and_unscale_(memories, found[device], moved(inverse, device))
    return found


def total_found_inf(
    device: torch.device | None, each: Iterable[FoundInf], where: str = "for this optimizer."
) -> Tensor:
    """Adds up what was found for several optimizers.

    Args:
        device: Where the sum is wanted; None is the first device that something was found on.
        each: What was found for each optimizer.
        where: Ends the first sentence of the error.

    Raises:
        ScalerError: No gradients were checked.
    """
    found = [number for one in each for number in one.values()]
    if found:
        to = device or found[0].device
        return functools.reduce(torch.add, (moved(number, to) for number in found))
    raise ScalerError(
        f"No inf checks were recorded {where} "  # PyTorch's words, which programs look for
        "That is, no gradients were checked in this iteration: no parameter of the optimizer has one, or "
        "step() was not called. Call scale(loss).backward(), step(optimizer), then update(); leave "
        "an optimizer out whose parameters took no part in the loss."
    )


def found_inf_so_far(scale: Tensor, found: FoundInf) -> Tensor:
    """The sum of what was found for one optimizer, on the scale's device; zero if nothing was checked yet."""
    return total_found_inf(scale.device, [found]) if found else torch.zeros_like(scale)


@torch.no_grad()
def bad_gradients(optimizer: Optimizer) -> Iterator[Place]:
    """The parameters whose gradients are not finite; waits for the device."""
    for number, place, parameter in _places(optimizer):
        if parameter.grad is not None and not are_finite(_gradient_memory(parameter)):
            yield number, place, parameter


@torch.no_grad()
def bad_parameters(optimizer: Optimizer) -> Iterator[Place]:
    """The parameters that are not finite themselves; waits for the device."""
    for number, place, parameter in _places(optimizer):
        if not is_finite(parameter):
            yield number, place, parameter


@torch.no_grad()
def largest(optimizer: Optimizer, like: Tensor) -> Tensor:
    """The largest absolute value in all gradients, float32, shape (), beside `like`; 0 if there are no gradients."""
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
    """The norm of all gradients; they are clipped to `max_norm` if they are finite. Waits for nothing."""
    parameters = parameters_of(optimizer)
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = total_norm(gradients, norm_type, error_if_nonfinite, foreach)
    bad = norm.isnan()
    for found in found_inf.values():
        bad = bad | (moved(found, norm.device) != 0)
    used = torch.where(bad, 0.0, norm)  # of finite gradients it may be infinite: then they become 0
    for sharded in (
        False,
        True,
    ):  # one call of PyTorch's multiplies either plain gradients or sharded ones
        some = [
            p for p in parameters if p.grad is not None and _torch.is_dtensor(p.grad) is sharded
        ]
        torch.nn.utils.clip_grads_with_norm_(some, max_norm, used, foreach)
    return norm


def _places(optimizer: Optimizer) -> Iterator[Place]:
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            yield number, place, parameter


def _why_float16(optimizer: Optimizer) -> str:
    pairs = [(p, p.grad) for p in parameters_of(optimizer) if p.grad is not None]
    of = {str(p.dtype) for p, gradient in pairs if gradient.dtype is torch.float16}
    others = sorted(of - {"torch.float16"})
    return _FLOAT16 + (
        _OF_OTHERS.format(dtype=others[0]) if others else cures.FLOAT32_PARAMETERS.text
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
    """The memory of a parameter's gradient, which is replaced first if it could not be checked or written as it is.

    Duplicate indices of a sparse float16 gradient are summed: the sum is what can overflow. A pending conjugation is
    carried out: only then the memory has the numbers.
    """
    assert parameter.grad is not None
    gradient = local(parameter.grad)
    if gradient.is_sparse and gradient.dtype is torch.float16 and not gradient.is_coalesced():
        gradient = parameter.grad = gradient.coalesce()
    if gradient.is_complex() and gradient.is_conj():
        gradient = parameter.grad = gradient.resolve_conj()
    return memory_of(gradient)
