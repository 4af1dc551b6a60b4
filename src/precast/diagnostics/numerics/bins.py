"""Counts of a tensor's magnitudes, and what the counts say about other formats.

A *bin* is the upper 12 bits of a float32: its exponent and 4 bits of its mantissa. Bin k holds the magnitudes above
``EDGES[k]`` and up to ``EDGES[k + 1]``, the latter included. So what rounds to zero is counted exactly, ties too: that
edge is a power of two in every format, and stays one under every scale that is a power of two.

Which shares are exact, and which are bounds:
- underflow is exact, but for scaled numbers that are compared below 2**-126, where the share is a lower bound;
- overflow is exact for float8_e4m3fn, and for float8_e5m2 but for numbers that are the tie itself (61440 at scale 1);
  for float16 and bfloat16 it is an upper bound: the top bin (63488 to 65536) is counted whole, unless the largest
  number fits;
- the share of subnormal numbers is like that of overflow: the edge of float16 and bfloat16 is moved up to a bin's;
- the rounding error is a mean: numbers are taken to be even within a bin.

What an 8-bit format loses is what the rules for products in 8 bits lose (`tests/float8/test_what_if.py`): the scale
under which the largest number fits is the one that `float8_pow2` gives a matrix.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_left, bisect_right
from collections import Counter
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
_BINS_OF_AN_EXPONENT: Final = 1 << (23 - SHIFT)
_LARGEST_SCALE: Final = 127  # as a power of two: a scale is a number of float32


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
    found: Counter[int] = Counter()
    for k, count in enumerate(magnitudes.counts, magnitudes.low):
        if count:
            found[k // _BINS_OF_AN_EXPONENT - 127 + magnitudes.power] += count
    return dict(found)


def what_if(several: Sequence[Magnitudes]) -> dict[str, dict[str, Any]]:
    """For each format: which shares of these numbers, of all tensors together, would be zero, overflow, be subnormal.

    "best_scale" is the power of two that loses the fewest of them, and of those the one nearest to 1; None where there
    is no number. The largest number fits under it. "with_best" are the shares of the numbers multiplied by it.
    """
    return {name: _in_format(several, FORMATS[name]) for name in WHAT_IF}


def _in_format(several: Sequence[Magnitudes], format: Format) -> dict[str, Any]:
    power = _best_power(several, format)
    return {
        **_shares(several, format, 0),
        "best_scale": None if power is None else math.ldexp(1.0, power),
        "with_best": _shares(several, format, power or 0),
        "error": _error(several, format),
    }


def _best_power(several: Sequence[Magnitudes], format: Format) -> int | None:
    """The exponent of the best scale.

    The larger a scale, the fewer numbers are too small, until the largest one overflows.
    """

    def too_small(power: int) -> tuple[int, int]:
        """How many become zero, and how many become zero or lose digits; neither grows with the scale."""
        zeros, _, subnormal = _outside(several, format, power)
        return zeros, zeros + subnormal

    most = _largest_power(max(one.maximum for one in several), format)
    if most is None or most <= 0:
        return most
    fewest = too_small(most)
    return bisect_left(range(most), True, key=lambda power: too_small(power) == fewest)


def _largest_power(maximum: float, format: Format) -> int | None:
    """The exponent of the largest scale under which this number fits; None for zero, which any does."""
    if not maximum:
        return None
    power = math.frexp(format.largest)[1] - math.frexp(maximum)[1]
    fits = math.ldexp(maximum, power) <= format.largest
    return min(power if fits else power - 1, _LARGEST_SCALE)


def _error(several: Sequence[Magnitudes], format: Format) -> float | None:
    """The relative error of rounding, each tensor scaled so that it just fits; None where there is no number."""
    wrong = squares = 0.0
    for one in several:
        power = _largest_power(one.maximum, format)
        if power is None:
            continue
        for k, count in enumerate(one.counts, one.low):
            if count:
                low, high = (math.ldexp(EDGES[edge], power + one.power) for edge in (k, k + 1))
                again = math.ldexp(count, -2 * power)
                wrong += again * _square_error(low, high, format)
                squares += again * (low * low + low * high + high * high) / 3
    return math.sqrt(wrong / squares) if squares else None


def _square_error(low: float, high: float, format: Format) -> float:
    """The mean square of what rounding changes between two edges, of which none is between the middles of a step."""
    exponent = max(math.frexp(low)[1] - 1, math.frexp(format.smallest_normal)[1] - 1)
    step = math.ldexp(
        format.smallest_subnormal, exponent - math.frexp(format.smallest_normal)[1] + 1
    )
    if step < 2 * (high - low):
        return step * step / 12
    first, last = (abs(edge - round(edge / step) * step) for edge in (low, high))
    return (first * first + first * last + last * last) / 3


def _shares(several: Sequence[Magnitudes], format: Format, power: int) -> dict[str, float]:
    total = sum(sum(one.counts) for one in several) or 1
    names = ("underflow", "overflow", "subnormal")
    counts = _outside(several, format, power)
    return {name: count / total for name, count in zip(names, counts, strict=True)}


def _outside(several: Sequence[Magnitudes], format: Format, power: int) -> list[int]:
    """How many of the numbers, times ``2**power``, would become zero, overflow, be subnormal."""
    each = [_outside_of_one(one, format, power + one.power) for one in several]
    return [sum(column) for column in zip(*each, strict=True)]


def _outside_of_one(magnitudes: Magnitudes, format: Format, power: int) -> tuple[int, int, int]:
    below = [0, *accumulate(magnitudes.counts)]

    def up_to(edge: float, *, whole: bool = False) -> int:
        """How many are not above `edge`; the bin that it divides counts as above it, or as below if `whole`."""
        edge = math.ldexp(edge, -power)
        k = bisect_right(EDGES, edge) - 1
        if whole and k < BINS and EDGES[k] < edge:
            k += 1
        return below[min(max(k - magnitudes.low, 0), len(below) - 1)]

    largest, edge = math.ldexp(magnitudes.largest, power), format.overflow_edge
    fits = largest < edge or (largest == edge and not format.infinities)
    zeros = up_to(format.zero_edge)
    over = 0 if fits else below[-1] - up_to(edge)
    return zeros, over, max(up_to(format.normal_edge, whole=True) - zeros, 0)
