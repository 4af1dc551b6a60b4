"""Quantisation of matrices to 8-bit values and scales.

With `a` the largest magnitude among the elements that share a scale, and `M` the largest value of the format:

    scale = float32(M / max(a, 1e-12))      computed in float64; optionally rounded down to a power of two
    data  = float8(clamp(float32(x) * scale, -M, M))
    x     ~ data * inverse                  with inverse = 1 / scale

Invariants:

- the results are those of torchao's dynamic scaling, bit for bit (`tests/float8/test_torchao.py`). The exception: if a
  power of two is a few millionths above the scale, torchao uses it and clamps;
- non-finite elements make every product with them NaN. A NaN makes the scale of its group NaN. An infinity makes the
  scale 0: the infinity itself becomes 0 * inf, and the other elements of the group become 0 * (1 / 0);
- a matrix of zeros stays zero. The scale is bounded, so values below 2e-18 (e4m3) also become zero.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from precast.weights.float8.formats import Scaling

__all__ = ["Quantised", "quantise", "scale_of", "with_scale"]

_SMALLEST: Final = 1e-12
"""Lower bound of the maximum in the formula above, as in torchao."""
_EXPONENT_BITS: Final = 0x7F800000
"""Mask of a float32's exponent bits. Applied to a positive number it gives the power of two at or below it."""


class Quantised(NamedTuple):
    """A matrix in 8 bits.

    Attributes:
        data: float8 values, of the matrix' shape.
        inverse: float32 factors for `data`, of shape `()`, `(rows, 1)` or `(1, columns)`.
    """

    data: Tensor
    inverse: Tensor

    def t(self) -> Quantised:
        """Return the transposed matrix, in the same memory."""
        return Quantised(self.data.t(), self.inverse.t() if self.inverse.dim() else self.inverse)


def quantise(matrix: Tensor, scaling: Scaling) -> Quantised:
    """Quantise a matrix.

    Args:
        matrix: `(rows, columns)`, floating-point, not empty.
        scaling: the format, and the elements that share a scale.
    """
    if not matrix.is_contiguous() and matrix.t().is_contiguous():  # keep the order in memory
        return quantise(matrix.t(), scaling.transposed).t()
    scale = scale_of(matrix, scaling)
    return Quantised(with_scale(matrix, scale, scaling.dtype), scale.reciprocal())


def with_scale(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a matrix times a scale in a float8 dtype. Values out of range become the largest value."""
    largest = torch.finfo(dtype).max
    # PyTorch 2.11 casts values out of range to NaN.
    return (matrix.float() * scale).clamp(-largest, largest).to(dtype)


def scale_of(matrix: Tensor, scaling: Scaling) -> Tensor:
    """Return the scale of a matrix: float32, of shape `()`, `(rows, 1)` or `(1, columns)`."""
    magnitudes = matrix.abs()
    shared = () if scaling.dim is None else scaling.dim
    largest = magnitudes.amax(shared, keepdim=scaling.dim is not None)
    # In float64: compiled code may round a float32 division differently.
    scale = torch.finfo(scaling.dtype).max / largest.double().clamp(min=_SMALLEST)
    return _power_of_two(scale.float()) if scaling.powers_of_two else scale.float()


def _power_of_two(scale: Tensor) -> Tensor:
    """Round scales down to powers of two by their bits, because `exp2` is not exact on every device."""
    power = (scale.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
    return torch.where(scale.isnan(), scale, power)
