"""A held copy in 8 bits: the numbers and scales of a weight that float8 rules multiply with, quantised once a step.

Invariants:

- it is a held copy like any other: the same rules renew, invalidate and compare it;
- a weight has one for each way in which it is scaled. With one scale for the whole weight, forward and backward share
  it; with scales for rows, backward has its own, with scales for columns;
- kernels are never lent it, and a step in one pass does not write it: the next use quantises the weight again.
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
        scaling: the format, and which numbers share a scale.
        scale: float32; the parameter was multiplied by it.
        inverse: float32; the copy's numbers are multiplied by it.
    """

    __slots__ = ("inverse", "scale", "scaling")

    inverse: Tensor
    scale: Tensor

    def __init__(self, parameter: Tensor, scaling: Scaling) -> None:
        super().__init__(parameter, scaling.dtype)
        self.scaling = scaling

    def quantise(self, source: Tensor) -> None:
        """Writes the numbers of the parameter, given without gradient, into the memory that there is for it."""
        scale = scale_of(source, self.scaling)
        self.tensor.copy_(with_scale(source, scale, self.scaling.dtype))
        if self.is_in_graphs:  # which know the addresses alone
            self.scale.copy_(scale)
            self.inverse.copy_(scale.reciprocal())
        else:  # who reads the old numbers reads the old scales
            self.scale, self.inverse = scale, scale.reciprocal()

    @property
    def scales(self) -> tuple[Tensor, Tensor]:
        """By what the parameter was multiplied, and by what the copy's numbers are."""
        return self.scale, self.inverse

    def agrees(self, numbers: Tensor, scale: Tensor, source: Tensor, rows: slice) -> Tensor:
        """Whether some rows of the copy are those of the parameter, as a tensor that may not be computed yet."""
        scales = scale[rows] if self.scaling.dim == -1 else scale
        wanted = with_scale(source[rows], scales, self.scaling.dtype)
        return (wanted.view(torch.uint8) == numbers[rows].view(torch.uint8)).all()
