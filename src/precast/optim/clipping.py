"""Clipping of gradients whose multiplication is left to the step that reads them.

Invariants:

- a gradient is multiplied once: by the step in one pass, or in place before the optimizer sees it;
- what is clipped is the gradient as it was when its norm was computed. One that is written before the step is an error;
  another tensor in its place is left alone.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from precast.errors import AttachError
from precast.optim.shards import versions_of
from precast.optim.total_norm import total_norm

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
        norm = total_norm(gradients, norm_type, error_if_nonfinite)
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
