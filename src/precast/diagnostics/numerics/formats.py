"""Floating-point formats as numbers: the largest and the smallest ones, and where rounding leads out of a format.

A value is rounded to the nearest number, and a tie to the even one, as PyTorch's casts do. The limits are those of
`torch.finfo`; it knows no edges of rounding, which follow from the limits here.

Invariant: tests compare the limits with the formats' definitions (IEEE 754; for 8 bits "FP8 Formats for Deep Learning",
Micikevicius et al., 2022), and each edge with PyTorch's casts.
"""

from __future__ import annotations

import math
from typing import Final

import torch

__all__ = ["FORMATS", "WHAT_IF", "Format"]


class Format:
    """The limits of a dtype, given by its name without ``torch.``."""

    def __init__(self, name: str) -> None:
        info = torch.finfo(getattr(torch, name))
        self.name = name
        self.infinities = not name.endswith("fn")
        """Whether there are infinities; "fn" says that there are none, and NaN in one pattern only."""
        self.largest = info.max
        """The largest finite number."""
        self.smallest_normal = info.smallest_normal
        """The smallest number with a full mantissa."""
        self.smallest_subnormal = info.smallest_normal * info.eps
        """The smallest number above zero."""
        self.zero_edge = self.smallest_subnormal / 2
        """Magnitudes up to this one become zero: it is the tie between the smallest number and zero, which is even."""
        self.normal_edge = self.smallest_normal - self.zero_edge
        """Magnitudes from this one on are rounded to a normal number, or overflow."""
        half_a_step = math.ldexp(info.eps, math.frexp(info.max)[1] - 2)
        self.overflow_edge = info.max + half_a_step
        """Magnitudes above this one overflow, and so does the tie itself where there are infinities.

        Without infinities, what overflows becomes NaN until PyTorch 2.12, and the largest number since.
        """


WHAT_IF: Final = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
"""The formats that a tensor could have instead of its own."""

FORMATS: Final = {name: Format(name) for name in ("float32", *WHAT_IF)}
"""The formats of the tensors that a monitor looks at, by name."""
