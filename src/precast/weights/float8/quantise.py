"""Turns matrices into 8-bit numbers and scales.

With `a` the largest magnitude among the numbers that share a scale, and `M` the largest number of the format:

    scale = float32(M / max(a, 1e-12))      computed in float64; perhaps rounded down to a power of two
    data  = float8(clamp(float32(x) * scale, -M, M))
    x     ~ data * inverse                  with inverse = 1 / scale

Invariants:

- the numbers are those of torchao's dynamic scaling, bit for bit (`tests/float8/test_torchao.py`), but where a power of
  two lies within a few millionths above the scale: there torchao takes that one, and clamps;
- what is not finite makes NaN of all that it is multiplied with. A NaN gives its numbers the scale NaN; an infinity
  gives them the scale 0, so that it becomes 0 * inf, and what shares the scale 0 * (1 / 0) when it is multiplied;
- all zeros stay zeros. As the scale is bounded, numbers below 2e-18 (e4m3) are zeros too, whatever is beside them.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from precast.weights.float8.formats import Scaling

__all__ = ["Quantised", "quantise", "scale_of", "with_scale"]

_SMALLEST: Final = 1e-12
"""What a maximum is taken for at least; the number is torchao's."""
_EXPONENT_BITS: Final = 0x7F800000
"""Sign and mantissa of a float32 set to zero: the power of two at or below a positive number."""


class Quantised(NamedTuple):
    """A matrix in 8 bits.

    Attributes:
        data: float8, of the matrix' shape.
        inverse: float32; by it `data` is multiplied. Of the shape `()`, `(rows, 1)` or `(1, columns)`.
    """

    data: Tensor
    inverse: Tensor

    def t(self) -> Quantised:
        """The transposed matrix, on the same memory."""
        return Quantised(self.data.t(), self.inverse.t() if self.inverse.dim() else self.inverse)


def quantise(matrix: Tensor, scaling: Scaling) -> Quantised:
    """A matrix in 8 bits.

    Args:
        matrix: `(rows, columns)`, floating-point, with at least one number.
        scaling: the format, and which numbers share a scale.
    """
    if not matrix.is_contiguous() and matrix.t().is_contiguous():  # as it lies in memory
        return quantise(matrix.t(), scaling.transposed).t()
    scale = scale_of(matrix, scaling)
    return Quantised(with_scale(matrix, scale, scaling.dtype), scale.reciprocal())


def with_scale(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of a matrix times a scale, in a float8 dtype; what is too large becomes the largest number."""
    largest = torch.finfo(dtype).max
    # The cast itself turns what is too large into NaN on PyTorch 2.11.
    return (matrix.float() * scale).clamp(-largest, largest).to(dtype)


def scale_of(matrix: Tensor, scaling: Scaling) -> Tensor:
    """By what the numbers of a matrix are multiplied: float32, `()`, `(rows, 1)` or `(1, columns)`."""
    magnitudes = matrix.abs()
    shared = () if scaling.dim is None else scaling.dim
    largest = magnitudes.amax(shared, keepdim=scaling.dim is not None)
    # In float64, as compiled code may divide float32 numbers in another way.
    scale = torch.finfo(scaling.dtype).max / largest.double().clamp(min=_SMALLEST)
    return _power_of_two(scale.float()) if scaling.powers_of_two else scale.float()


def _power_of_two(scale: Tensor) -> Tensor:
    """The largest power of two that is not above each scale, by its bits: `exp2` is not exact on every device."""
    power = (scale.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
    return torch.where(scale.isnan(), scale, power)
