"""Floating-point formats as numbers: what the largest and smallest are, and where rounding leads out of them.

A value is rounded to the nearest, ties to the even one, as PyTorch's casts do. float16 and bfloat16 are IEEE 754's
binary16 and the upper half of its binary32; those of 8 bits are of "FP8 Formats for Deep Learning" (Micikevicius et
al., 2022): E5M2 as IEEE 754 would have it; E4M3 has no infinities, and numbers where these would be but for one NaN.

Invariants: needs no PyTorch; a test holds each number against `torch.finfo`, and each edge against PyTorch's casts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

__all__ = ["FORMATS", "WHAT_IF", "Format"]


@dataclass(frozen=True, slots=True)
class Format:
    """A binary format: (-1)^sign * 1.mantissa * 2^(exponent - bias), and subnormal numbers below."""

    name: str
    """As PyTorch calls it."""
    exponent_bits: int
    mantissa_bits: int
    bias: int
    infinities: bool = True
    """Whether the largest exponent is kept for infinity and NaN; else all its patterns but one are numbers."""

    @property
    def largest(self) -> float:
        """The largest finite number."""
        steps = 2**self.mantissa_bits
        if self.infinities:
            return math.ldexp(2 - 1 / steps, 2**self.exponent_bits - 2 - self.bias)
        return math.ldexp(2 - 2 / steps, 2**self.exponent_bits - 1 - self.bias)

    @property
    def smallest_normal(self) -> float:
        """The smallest number with a full mantissa."""
        return 2.0 ** (1 - self.bias)

    @property
    def smallest_subnormal(self) -> float:
        """The smallest number above zero."""
        return self.smallest_normal * 2.0**-self.mantissa_bits

    @property
    def zero_edge(self) -> float:
        """What is not above this becomes zero: the tie with the smallest number goes to zero, which is even."""
        return self.smallest_subnormal / 2

    @property
    def normal_edge(self) -> float:
        """What is not below this becomes normal, or larger."""
        return self.smallest_normal - self.zero_edge

    @property
    def overflow_edge(self) -> float:
        """What is above this overflows; the tie itself does where there are infinities.

        Without, it becomes NaN until PyTorch 2.12, and the largest number since.
        """
        exponent = 2**self.exponent_bits - (2 if self.infinities else 1) - self.bias
        return self.largest + math.ldexp(0.5, exponent - self.mantissa_bits)


FORMATS: Final = {
    each.name: each
    for each in (
        Format("float32", 8, 23, 127),
        Format("float16", 5, 10, 15),
        Format("bfloat16", 8, 7, 127),
        Format("float8_e4m3fn", 4, 3, 7, infinities=False),
        Format("float8_e5m2", 5, 2, 15),
    )
}
"""The formats that tensors are looked at in, by name."""

WHAT_IF: Final = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
"""The formats that a tensor could be in instead."""
