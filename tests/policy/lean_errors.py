"""The error of the policy `lean` against float64, relative to that of the policy `torch`.

A ratio is the error under a policy with the row over the error under `torch`, both against float64: of the root mean
square and the largest element the worse, and the worst over all cases, dtypes and seeds. Both policies get the same
inputs, rounded to the region's 16-bit dtype, and the same 16-bit gradient, as the matmul behind the operation gives it.
Results are compared *after* they are rounded to the region's dtype, because that matmul rounds what it takes; gradients
are compared in the dtypes of their inputs. An operation behind it that takes float32 sees more: the last ratio.

Invariants:
    - Rules of CUDA are measured on CPU kernels; what those do otherwise in backward has `gradients_on="cuda"`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import precast
from precast.policy.policy import Policy
from tests.policy.lean_cases import Case

__all__ = ["DTYPES", "Outcome", "Ratios", "outcome", "ratios"]

DTYPES = (torch.bfloat16, torch.float16)


class Outcome(NamedTuple):
    """What a case gives: its result, and the gradients of its floating inputs."""

    value: Tensor
    gradients: tuple[Tensor, ...]


class Ratios(NamedTuple):
    """Errors over those under the policy `torch`; infinite where only `torch` is finite."""

    value: float
    gradients: float | None
    unrounded: float


def outcome(
    case: Case, dtype: torch.dtype, seed: int, policy: Policy | None, device: str = "cpu"
) -> Outcome:
    """Runs a case in a region with `policy`, or where that is None in float64 on the very same inputs."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [t.to(device) for t in case.inputs(generator)]
    exact = len(drawn) - case.weights
    inputs = [_rounded(t, dtype if i < exact else torch.float32) for i, t in enumerate(drawn)]
    if policy is None:
        inputs = [_rounded(t, torch.float64) for t in inputs]
    leaves = [t.requires_grad_() for t in inputs if t.is_floating_point()]
    with precast.autocast(
        device, dtype=dtype, policy=policy or "torch", enabled=policy is not None
    ):
        value = case.call(*inputs)
    arriving = torch.randn(value.shape, generator=generator).to(device, dtype)
    taken = value if case.into_float32 or policy is None else value.to(dtype)
    gradients = torch.autograd.grad(taken, leaves, arriving.to(taken.dtype))
    return Outcome(value.detach(), gradients)


def ratios(
    case: Case, dtype: torch.dtype, seed: int, policies: tuple[Policy, Policy], device: str = "cpu"
) -> Ratios:
    """The errors of a case under the second policy over those under the first."""
    exact = outcome(case, dtype, seed, None, device)
    before, after = (outcome(case, dtype, seed, policy, device) for policy in policies)
    taken = [o.value if case.into_float32 else o.value.to(dtype) for o in (before, after)]
    pairs = zip(before.gradients, after.gradients, exact.gradients, strict=True)
    unrounded = _ratio(before.value, after.value, exact.value)
    # What overflows in 16 bits is no better for `torch` overflowing too once its float32 is rounded.
    value = unrounded if unrounded == float("inf") else _ratio(taken[0], taken[1], exact.value)
    asked = case.gradients_on in ("", device)
    return Ratios(value, max(_ratio(*pair) for pair in pairs) if asked else None, unrounded)


def _rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.detach().to(dtype, copy=True) if tensor.is_floating_point() else tensor


def _ratio(before: Tensor, after: Tensor, exact: Tensor) -> float:
    sound = before.isfinite()
    if not after[sound].isfinite().all():
        return float("inf")
    if not sound.any():
        return 1.0
    first, second = (_norms((t.double() - exact)[sound]) for t in (before, after))
    return max(_quotient(b, a) for b, a in zip(first, second, strict=True))


def _norms(error: Tensor) -> tuple[float, float]:
    return error.square().mean().sqrt().item(), error.abs().max().item()


def _quotient(before: float, after: float) -> float:
    if before == 0:
        return 1.0 if after == 0 else float("inf")
    return after / before
