"""Held copies in 8 bits: the values and scales of weights with float8 rules, quantised once per step.

Invariants:

- they are updated, invalidated and compared like held copies in 16 bits;
- a weight has one copy per `Scaling`. With one scale per matrix, forward and backward share a copy; with row scales,
  backward has a second one, with column scales;
- they are never lent to kernels: the next use after a step quantises the weight again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from precast.weights.float8.formats import Scaling
from precast.weights.float8.quantise import scale_of, with_scale
from precast.weights.held_copy import Copy

__all__ = ["QuantisedCopy"]


class QuantisedCopy(Copy):
    """A parameter in 8 bits, with its scales.

    Attributes:
        scaling: the format, and the elements that share a scale.
        scale: float32 factor of the parameter.
        inverse: float32 factor of the copy's values.
    """

    __slots__ = ("inverse", "scale", "scaling")

    inverse: Tensor
    scale: Tensor

    def __init__(self, parameter: Tensor, scaling: Scaling) -> None:
        super().__init__(parameter, scaling.dtype)
        self.scaling = scaling

    def quantise(self, source: Tensor) -> None:
        """Quantise the parameter, which must be detached, into the copy's memory."""
        scale = scale_of(source, self.scaling)
        self.tensor.copy_(with_scale(source, scale, self.scaling.dtype))
        if self.is_in_graphs:  # a CUDA graph reads these addresses
            self.scale.copy_(scale)
            self.inverse.copy_(scale.reciprocal())
        else:  # code that uses the old values needs the old scales
            self.scale, self.inverse = scale, scale.reciprocal()

    @property
    def scales(self) -> tuple[Tensor, Tensor]:
        """The scale of the parameter, and its inverse."""
        return self.scale, self.inverse

    def matches(self, values: Tensor, scale: Tensor, source: Tensor, rows: slice) -> Tensor:
        """Return a bool tensor, without a wait for the device: True if these rows of the copy match the parameter."""
        scales = scale[rows] if self.scaling.dim == -1 else scale
        expected = with_scale(source[rows], scales, self.scaling.dtype)
        return (expected.view(torch.uint8) == values[rows].view(torch.uint8)).all()
