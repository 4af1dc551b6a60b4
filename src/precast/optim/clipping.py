"""Clipping of gradients, with the multiplication deferred to a step that reads them.

Invariants:

- a gradient is multiplied once: by the compiled step, or in place before the optimizer reads it;
- the factor applies to the gradient from which the norm was computed. A gradient that is written before the step is an
  error; another tensor in its place is not multiplied.
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
    """The gradients that the next step multiplies, and the factor."""

    def __init__(self) -> None:
        self._factor = 1.0
        self._deferred: dict[int, tuple[Tensor, tuple[int, ...]]] = {}
        """Maps ``id`` of a parameter to its gradient and the version counters of the gradient."""

    def clip(
        self,
        parameters: Iterable[Tensor],
        later: set[int],
        max_norm: float,
        norm_type: float,
        error_if_nonfinite: bool,
    ) -> Tensor:
        """Clip the norm of gradients as `torch.nn.utils.clip_grad_norm_` does; defer some of the multiplications.

        Args:
            parameters: the parameters with the gradients.
            later: ``id`` of those whose gradients the step multiplies; all others are multiplied now.
            max_norm: the largest norm that is not reduced.
            norm_type: order of the norm.
            error_if_nonfinite: raise RuntimeError if the norm is not finite, as PyTorch does.

        Returns:
            The norm before clipping, shape ().
        """
        trained = [p for p in parameters if p.grad is not None]
        gradients = [p.grad for p in trained if p.grad is not None]
        self._deferred = {}  # factors of earlier calls without a step are replaced, not multiplied
        norm = total_norm(gradients, norm_type, error_if_nonfinite)
        factor = torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0)
        self._factor = factor.item()
        for parameter, gradient in zip(trained, gradients, strict=True):
            if id(parameter) in later:
                self._deferred[id(parameter)] = gradient, versions_of(gradient)
            else:
                gradient.mul_(factor)
        return norm

    def take(self, parameters: Iterable[Tensor]) -> dict[int, float]:
        """Return a mapping from ``id`` of each parameter to the factor for its gradient, and forget the factors.

        Raises:
            AttachError: a gradient has been written since.
        """
        deferred, self._deferred = self._deferred, {}
        if not deferred:
            return {}
        factors = {}
        for parameter in parameters:
            gradient, versions = deferred.get(id(parameter), (None, ()))
            if gradient is None or parameter.grad is not gradient:
                continue
            if versions_of(gradient) != versions:
                raise AttachError(
                    f"A gradient of shape {tuple(gradient.shape)} was written between clip_grad_norm_() and the step "
                    "that clips it. Call clip_grad_norm_() after the last backward and after scaler.unscale_(), just "
                    "before the step."
                )
            factors[id(parameter)] = self._factor
        return factors
