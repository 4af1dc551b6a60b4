"""Histogram of a tensor's magnitudes, and the loss of the same values in other formats.

A *bin* is the upper 12 bits of a float32: its exponent and 4 bits of its mantissa. Bin k holds the magnitudes above
``EDGES[k]`` and up to ``EDGES[k + 1]``, the latter included. So values that round to zero are counted exactly, ties
too: that edge is a power of two in every format, also under every scale that is a power of two.

Shares are exact or bounds:

- underflow is exact, except for scaled values that are compared below 2**-126, where the share is a lower bound;
- overflow is exact for float8_e4m3fn, and for float8_e5m2 except for the tie itself (61440 at scale 1); for float16 and
  bfloat16 it is an upper bound: the top bin (63488 to 65536) is counted completely, unless the largest value fits;
- the share of subnormal values is like that of overflow: the edge of float16 and bfloat16 is rounded up to a bin's;
- the rounding error is a mean, which assumes that values are evenly distributed within a bin.

The loss of an 8-bit format equals that of the rules for products in 8 bits (`tests/float8/test_what_if.py`): the
largest scale under which all values fit is the one that `float8_pow2` gives a matrix.
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

from precast.diagnostics.numerics.formats import FORMATS, WHAT_IF, FloatFormat

__all__ = ["BINS", "EDGES", "SHIFT", "Magnitudes", "exponents", "what_if"]

SHIFT: Final = 19
"""The lower bits of a float32 that a bin leaves out."""
BINS: Final = 0x7F800000 >> SHIFT
"""The number of bins for finite values."""
EDGES: Final = [struct.unpack("<f", struct.pack("<I", k << SHIFT))[0] for k in range(BINS)] + [
    2.0**128
]
_BINS_OF_AN_EXPONENT: Final = 1 << (23 - SHIFT)
_LARGEST_SCALE: Final = 127  # as a power of two: a scale is a number of float32


@dataclass(frozen=True, slots=True)
class Magnitudes:
    """The finite magnitudes above zero of a tensor, in units of ``2**power``."""

    low: int
    """The bin of the first count."""
    counts: Sequence[int]
    largest: float
    """The largest magnitude, exactly, in the same units; 0.0 if there is none."""
    power: int = 0
    """-10 for gradients under a loss scale of 1024."""

    @property
    def maximum(self) -> float:
        """The largest magnitude."""
        return math.ldexp(self.largest, self.power)


def exponents(magnitudes: Magnitudes) -> dict[int, int]:
    """Return counts by binary exponent: e counts magnitudes above 2**e and up to 2**(e + 1).

    The subnormal values of float32 share one exponent.
    """
    counts: Counter[int] = Counter()
    for k, count in enumerate(magnitudes.counts, magnitudes.low):
        if count:
            counts[k // _BINS_OF_AN_EXPONENT - 127 + magnitudes.power] += count
    return dict(counts)


def what_if(several: Sequence[Magnitudes]) -> dict[str, dict[str, Any]]:
    """Return for each format the shares of all values that would be zero, overflow, or be subnormal.

    "best_scale" is the power of two that loses the fewest values, and of several the one nearest to 1; None without
    values. The largest value fits under it. "with_best" are the shares of the values multiplied by it.
    """
    return {name: _in_format(several, FORMATS[name]) for name in WHAT_IF}


def _in_format(several: Sequence[Magnitudes], format: FloatFormat) -> dict[str, Any]:
    power = _best_power(several, format)
    return {
        **_shares(several, format, 0),
        "best_scale": None if power is None else math.ldexp(1.0, power),
        "with_best": _shares(several, format, power or 0),
        "error": _error(several, format),
    }


def _best_power(several: Sequence[Magnitudes], format: FloatFormat) -> int | None:
    """Return the exponent of the best scale.

    The larger a scale, the fewer values are too small, until the largest one overflows.
    """

    def too_small(power: int) -> tuple[int, int]:
        """Return the numbers of values that become zero, and that become zero or subnormal."""
        zeros, _, subnormal = _outside(several, format, power)
        return zeros, zeros + subnormal

    most = _largest_power(max(one.maximum for one in several), format)
    if most is None or most <= 0:
        return most
    fewest = too_small(most)
    return bisect_left(range(most), True, key=lambda power: too_small(power) == fewest)


def _largest_power(maximum: float, format: FloatFormat) -> int | None:
    """Return the exponent of the largest scale under which a value fits; None for zero."""
    if not maximum:
        return None
    power = math.frexp(format.largest)[1] - math.frexp(maximum)[1]
    fits = math.ldexp(maximum, power) <= format.largest
    return min(power if fits else power - 1, _LARGEST_SCALE)


def _error(several: Sequence[Magnitudes], format: FloatFormat) -> float | None:
    """Return the relative rounding error, each tensor scaled to the format's range; None without values."""
    errors = squares = 0.0
    for one in several:
        power = _largest_power(one.maximum, format)
        if power is None:
            continue
        for k, count in enumerate(one.counts, one.low):
            if count:
                low, high = (math.ldexp(EDGES[edge], power + one.power) for edge in (k, k + 1))
                weight = math.ldexp(count, -2 * power)
                errors += weight * _square_error(low, high, format)
                squares += weight * (low * low + low * high + high * high) / 3
    return math.sqrt(errors / squares) if squares else None


def _square_error(low: float, high: float, format: FloatFormat) -> float:
    """Return the mean square of the rounding error between two edges of a bin."""
    exponent = max(math.frexp(low)[1] - 1, math.frexp(format.smallest_normal)[1] - 1)
    step = math.ldexp(
        format.smallest_subnormal, exponent - math.frexp(format.smallest_normal)[1] + 1
    )
    if step < 2 * (high - low):
        return step * step / 12
    first, last = (abs(edge - round(edge / step) * step) for edge in (low, high))
    return (first * first + first * last + last * last) / 3


def _shares(several: Sequence[Magnitudes], format: FloatFormat, power: int) -> dict[str, float]:
    total = sum(sum(one.counts) for one in several) or 1
    names = ("underflow", "overflow", "subnormal")
    counts = _outside(several, format, power)
    return {name: count / total for name, count in zip(names, counts, strict=True)}


def _outside(several: Sequence[Magnitudes], format: FloatFormat, power: int) -> list[int]:
    """Return the numbers of values that, times ``2**power``, would become zero, overflow, or be subnormal."""
    each = [_outside_of_one(one, format, power + one.power) for one in several]
    return [sum(column) for column in zip(*each, strict=True)]


def _outside_of_one(one: Magnitudes, format: FloatFormat, power: int) -> tuple[int, int, int]:
    below = [0, *accumulate(one.counts)]

    def up_to(k: int) -> int:
        return below[min(max(k - one.low, 0), len(below) - 1)]

    zero, normal, end = (
        math.ldexp(edge, -power)
        for edge in (format.zero_edge, format.normal_edge, format.overflow_edge)
    )
    fits = one.largest < end or (one.largest == end and not format.infinities)
    zeros, finite = (up_to(bisect_right(EDGES, edge) - 1) for edge in (zero, end))
    small = up_to(bisect_left(EDGES, normal))  # with the bin that the edge divides
    return zeros, 0 if fits else below[-1] - finite, max(small - zeros, 0)
