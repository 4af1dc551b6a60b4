"""What quantised numbers and their products are, in Python's own floats: written from the formats, not from the code.

Invariant: nothing here uses a float8 dtype of PyTorch's, or a function of `precast.weights.float8`.
"""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["E4M3", "E5M2", "Format", "float32", "quantised", "rounded", "scale_for"]


class Format(NamedTuple):
    """An 8-bit format: how many bits of mantissa, the exponent of its smallest normal number, its largest number."""

    mantissa: int
    lowest: int
    largest: float


E4M3 = Format(3, -6, 448.0)
E5M2 = Format(2, -14, 57344.0)


def float32(value: float) -> float:
    """The float32 nearest to a number."""
    try:
        nearest: float = struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    return nearest


def scale_for(numbers: list[float], form: Format, *, powers_of_two: bool) -> float:
    """The scale that these numbers share."""
    if any(math.isnan(number) for number in numbers):
        return math.nan
    scale = float32(form.largest / max(1e-12, *(abs(number) for number in numbers)))
    return 2.0 ** (math.frexp(scale)[1] - 1) if powers_of_two and scale else scale


def rounded(value: float, form: Format) -> float:
    """The number of the format that is nearest; of two, the even one. Too large ones become the largest."""
    if math.isnan(value) or value == 0:
        return value
    value = max(-form.largest, min(form.largest, value))
    exponent = max(math.frexp(value)[1] - 1, form.lowest)
    step = 2.0 ** (exponent - form.mantissa)
    return math.copysign(round(abs(value) / step) * step, value)


def quantised(
    matrix: Tensor, form: Format, dim: int | None, *, powers_of_two: bool
) -> tuple[Tensor, Tensor]:
    """The 8-bit numbers of a matrix and their scales, both in float64 and of the matrix' shape."""
    rows: list[list[float]] = matrix.double().tolist()
    if dim == 0:
        rows = [list(column) for column in zip(*rows, strict=True)]
    everything = [number for row in rows for number in row]
    data, scales = [], []
    for row in rows:
        scale = scale_for(everything if dim is None else row, form, powers_of_two=powers_of_two)
        scales.append([scale] * len(row))
        data.append([rounded(float32(number * scale), form) for number in row])
    found = torch.tensor(data, dtype=torch.float64), torch.tensor(scales, dtype=torch.float64)
    return (found[0].t(), found[1].t()) if dim == 0 else found
