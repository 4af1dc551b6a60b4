"""Clipping of gradients whose multiplication is left to the step that reads them.

Invariants:

- a gradient is multiplied once: by the step in one pass, or in place before the optimizer sees it;
- what is clipped is the gradient as it was when its norm was computed. One that is written before the step is an error;
  another tensor in its place is left alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from precast._torch import is_dtensor
from precast.errors import AttachError
from precast.weights.shards import largest_over, part_of, versions_of

__all__ = ["Clipping"]


class Clipping:
    """Which gradients the next step multiplies, and by what."""

    def __init__(self) -> None:
        self._factor = 1.0
        self._waiting: dict[int, tuple[Tensor, tuple[int, ...]]] = {}
        """``id`` of a parameter -> its gradient, and the versions that this had."""

    def clip(
        self,
        parameters: Iterable[Tensor],
        later: set[int],
        max_norm: float,
        norm_type: float,
        error_if_nonfinite: bool,
    ) -> Tensor:
        """What `torch.nn.utils.clip_grad_norm_` does, with the multiplication left to the step for some.

        Args:
            parameters: whose gradients are clipped together.
            later: ``id`` of those whose gradients the step multiplies; all others are multiplied now.
            max_norm: the largest norm that is left as it is.
            norm_type: which norm.
            error_if_nonfinite: whether a norm that is not finite raises RuntimeError, as PyTorch does.

        Returns:
            The norm before clipping, shape ().
        """
        trained = [p for p in parameters if p.grad is not None]
        gradients = [p.grad for p in trained if p.grad is not None]
        self._waiting = {}  # gradients that were clipped before and not stepped are clipped as they are
        norm = _total_norm(gradients, norm_type, error_if_nonfinite)
        factor = torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0)
        self._factor = factor.item()
        for parameter, gradient in zip(trained, gradients, strict=True):
            if id(parameter) in later:
                self._waiting[id(parameter)] = gradient, versions_of(gradient)
            else:
                gradient.mul_(factor)
        return norm

    def take(self, parameters: Iterable[Tensor]) -> dict[int, float]:
        """``id`` of each parameter whose gradient the step is to multiply -> by what; they wait no longer.

        Raises:
            AttachError: one of them has been written since.
        """
        waiting, self._waiting = self._waiting, {}
        if not waiting:
            return {}
        factors = {}
        for parameter in parameters:
            gradient, versions = waiting.get(id(parameter), (None, ()))
            if gradient is None or parameter.grad is not gradient:
                continue
            if versions_of(gradient) != versions:
                raise AttachError(
                    f"A gradient of shape {tuple(gradient.shape)} was written between attachment.clip_grad_norm_() and "
                    "the step, which is to clip it as it was. Call clip_grad_norm_() after the last backward and after "
                    "scaler.unscale_(), just before the step."
                )
            factors[id(parameter)] = self._factor
        return factors


def _total_norm(gradients: Sequence[Tensor], norm_type: float, error_if_nonfinite: bool) -> Tensor:
    """PyTorch's norm, over all processes where gradients are sharded: then it is the same number in each."""
    by_mesh: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        mesh = gradient.device_mesh if is_dtensor(gradient) else None  # type: ignore[attr-defined]
        by_mesh.setdefault(mesh, []).append(gradient)
    if not any(by_mesh):
        return get_total_norm(gradients, norm_type, error_if_nonfinite)
    norms = [
        get_total_norm(some, norm_type) if mesh is None else _norm_over(some, norm_type)
        for mesh, some in by_mesh.items()
    ]
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"The norm of order {norm_type} of the gradients is {norm.item()}, so they cannot be clipped. With "
            "error_if_nonfinite=False they are multiplied by what follows from it."
        )
    return norm


def _norm_over(gradients: Sequence[Any], norm_type: float) -> Tensor:
    """The norm of gradients that the processes of one mesh have parts of."""
    if norm_type != math.inf:
        return get_total_norm(gradients, norm_type).full_tensor()  # type: ignore[attr-defined,no-any-return]
    # PyTorch raises where one of the parts has no numbers (2.13), in that process alone, while others wait.
    parts = [part_of(gradient) for gradient in gradients]
    norms = [torch.linalg.vector_norm(part, norm_type) for part in parts if part.numel()]
    here = get_total_norm([*norms, parts[0].new_zeros(())], norm_type)
    # Comparing numbers of several processes may lose NaN.
    return largest_over(gradients[0], here.nan_to_num(nan=math.inf, posinf=math.inf))
