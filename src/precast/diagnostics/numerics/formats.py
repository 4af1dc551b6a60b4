"""Floating-point formats: limits, and the edges from which rounding gives zero, a subnormal value or overflow.

Values are rounded to nearest, ties to even, as in PyTorch's casts. The limits are those of `torch.finfo`, and the edges
follow from them.

Invariant: tests compare the limits with the formats' definitions (IEEE 754; for 8 bits "FP8 Formats for Deep Learning",
Micikevicius et al., 2022), and each edge with PyTorch's casts.
"""

from __future__ import annotations

import math
from typing import Final

import torch

__all__ = ["FORMATS", "WHAT_IF", "FloatFormat"]


class FloatFormat:
    """The limits of a dtype, by its name without ``torch.``."""

    def __init__(self, name: str) -> None:
        info = torch.finfo(getattr(torch, name))
        self.name = name
        self.infinities = not name.endswith("fn")
        """True if the format has infinities. "fn" formats have none, and a single NaN."""
        self.largest = info.max
        """The largest finite value."""
        self.smallest_normal = info.smallest_normal
        """The smallest value with a full mantissa."""
        self.smallest_subnormal = info.smallest_normal * info.eps
        """The smallest value above zero."""
        self.zero_edge = self.smallest_subnormal / 2
        """Magnitudes up to this one become zero: it is the tie between the smallest value and zero, which is even."""
        self.normal_edge = self.smallest_normal - self.zero_edge
        """Magnitudes from this one on are rounded to a normal value, or overflow."""
        half_a_step = math.ldexp(info.eps, math.frexp(info.max)[1] - 2)
        self.overflow_edge = info.max + half_a_step
        """Magnitudes above this one overflow, as does this one itself in a format with infinities.

        Without infinities, overflow gives NaN until PyTorch 2.12, and the largest value since.
        """


WHAT_IF: Final = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
"""The formats for which the loss of a tensor's values is computed."""

FORMATS: Final = {name: FloatFormat(name) for name in ("float32", *WHAT_IF)}
"""The formats of the tensors that a monitor examines, by name."""
