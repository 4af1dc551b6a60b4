"""What a tensor's magnitudes are counted in, and what the counts say of other formats.

A *bin* is the upper 12 bits of a float32: its exponent and 4 bits of its mantissa. Bin k holds the magnitudes above
``EDGES[k]`` and up to ``EDGES[k + 1]``, the latter included. So what rounds to zero is counted exactly, ties too: that
edge is a power of two in every format, and stays one under every scale that is a power of two.

What of the shares is exact, and what a bound:
- underflow: exact, but for scaled numbers that are compared below 2**-126, where it is a lower bound;
- overflow: exact for float8_e4m3fn; for float8_e5m2 all but numbers that are the tie itself (61440 at scale 1); for
  float16 and bfloat16 an upper bound: the top bin (63488 to 65536) is counted whole, unless the largest number fits;
- subnormal: as overflow, at the other end: float16's and bfloat16's edge is moved up to the bin's.

Invariants: needs no PyTorch.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

from precast.diagnostics.numerics.formats import FORMATS, WHAT_IF, Format

__all__ = ["BINS", "EDGES", "SHIFT", "Magnitudes", "exponents", "what_if"]

SHIFT: Final = 19
"""The lower bits of a float32 that a bin leaves out."""
BINS: Final = 0x7F800000 >> SHIFT
"""How many bins finite numbers have."""
EDGES: Final = [struct.unpack("<f", struct.pack("<I", k << SHIFT))[0] for k in range(BINS)] + [
    2.0**128
]
_A_BINADE: Final = 1 << (23 - SHIFT)
_MOST_POWER: Final = 127
"""A scale is a number of float32."""


@dataclass(frozen=True, slots=True)
class Magnitudes:
    """The finite magnitudes above zero of a tensor, each of which stands for itself times ``2**power``."""

    low: int
    """The bin of the first count."""
    counts: Sequence[int]
    largest: float
    """The largest as counted, exactly; 0.0 if there is none."""
    power: int = 0
    """-10 for gradients under a loss scale of 1024."""

    @property
    def maximum(self) -> float:
        """The largest number that is stood for."""
        return math.ldexp(self.largest, self.power)


def exponents(magnitudes: Magnitudes) -> dict[int, int]:
    """Binary exponent -> how many: e counts those above 2**e and up to 2**(e + 1); float32's subnormals in one."""
    found: dict[int, int] = {}
    for k, count in enumerate(magnitudes.counts, magnitudes.low):
        if count:
            exponent = k // _A_BINADE - 127 + magnitudes.power
            found[exponent] = found.get(exponent, 0) + count
    return found


def what_if(several: Sequence[Magnitudes]) -> dict[str, dict[str, Any]]:
    """For each format: which shares of these numbers, of all tensors together, would be zero, overflow, be subnormal.

    "best_scale" is the power of two that loses the fewest of them, and of those the one nearest to 1; None where there
    is no number. The largest number fits under it. "with_best" are the shares of the numbers multiplied by it.
    """
    return {name: _in_format(several, FORMATS[name]) for name in WHAT_IF}


def _in_format(several: Sequence[Magnitudes], format: Format) -> dict[str, Any]:
    power = _best(several, format)
    return {
        **_shares(several, format, 0),
        "best_scale": None if power is None else math.ldexp(1.0, power),
        "with_best": _shares(several, format, power or 0),
    }


def _best(several: Sequence[Magnitudes], format: Format) -> int | None:
    """The exponent of the best scale: the larger, the fewer numbers are too small, until the largest overflows."""
    maximum = max((one.maximum for one in several), default=0.0)
    if not maximum:
        return None
    most = min(_largest_power(maximum, format), _MOST_POWER)
    if most <= 0:
        return most
    fewest = _too_small(several, format, most)
    return bisect_left(range(most), True, key=lambda p: _too_small(several, format, p) == fewest)


def _largest_power(maximum: float, format: Format) -> int:
    """The exponent of the largest power of two under which a number fits."""
    power = math.frexp(format.largest)[1] - math.frexp(maximum)[1]
    return power if math.ldexp(maximum, power) <= format.largest else power - 1


def _too_small(several: Sequence[Magnitudes], format: Format, power: int) -> tuple[int, int]:
    """How many become zero under a scale, and how many lose digits or become zero; neither grows with the scale."""
    each = [_counted(one, format, power + one.power) for one in several]
    zeros, subnormal = sum(one[0] for one in each), sum(one[2] for one in each)
    return zeros, zeros + subnormal


def _shares(several: Sequence[Magnitudes], format: Format, power: int) -> dict[str, float]:
    each = [_counted(one, format, power + one.power) for one in several]
    total = sum(sum(one.counts) for one in several) or 1
    sums = (sum(column) / total for column in zip(*each, strict=True))
    return dict(zip(("underflow", "overflow", "subnormal"), sums, strict=False)) or _NOTHING


_NOTHING = {"underflow": 0.0, "overflow": 0.0, "subnormal": 0.0}


def _counted(magnitudes: Magnitudes, format: Format, power: int) -> tuple[int, int, int]:
    """How many of the magnitudes, times ``2**power``, would become zero, overflow, be subnormal."""
    below = [0, *accumulate(magnitudes.counts)]

    def up_to(edge: float, *, whole: bool = False) -> int:
        """How many are not above `edge`; of the bin that it parts none, or all."""
        edge = math.ldexp(edge, -power)
        k = bisect_right(EDGES, edge) - 1
        if whole and k < BINS and EDGES[k] < edge:
            k += 1
        return below[min(max(k - magnitudes.low, 0), len(below) - 1)]

    zeros = up_to(format.zero_edge)
    fits = _fits(math.ldexp(magnitudes.largest, power), format)
    over = 0 if fits else below[-1] - up_to(format.overflow_edge)
    return zeros, over, max(up_to(format.normal_edge, whole=True) - zeros, 0)


def _fits(maximum: float, format: Format) -> bool:
    edge = format.overflow_edge
    return maximum < edge or (maximum == edge and not format.infinities)
