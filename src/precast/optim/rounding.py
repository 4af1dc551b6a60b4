"""Rounding from float32 to bfloat16, stochastically or to the nearest value, in arithmetic that can be compiled.

Invariants:

- the rounding survives a compiler that removes a cast to bfloat16 and back, as Inductor does: it is arithmetic in
  float32, and each operation is exact or rounds as intended. Bit operations are not used, because Inductor would
  compile a view in another dtype without vector instructions, which costs more than the whole rounding;
- stochastic rounding depends on the value, its index and the seed only: a program gives the same result in any process,
  with any number of threads;
- infinities and NaN are unchanged, and stochastic rounding makes no finite value infinite.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import torch
from torch import Tensor

from precast import _torch

__all__ = ["OF_ROUNDING", "REST", "SEED", "Rounding", "nearest", "next_seed", "seeds", "stochastic"]

Rounding = Literal["kahan", "stochastic"]
"""The use of the rounding error of a weight: stored and added to the next update, or made 0 in the mean."""
REST: Final = "rounded_away"
SEED: Final = "rounding_seed"
OF_ROUNDING: Final = (REST, SEED)
"""Keys that precast adds to an optimizer's states: a bfloat16 tensor of the weight's shape, and an integer."""

_64_BITS: Final = 0xFFFFFFFFFFFFFFFF
_32_BITS: Final = 0xFFFFFFFF
_FACTOR: Final = 0x45D9F3B
"""The factor of the hash, with shifts by 16: C. Wellons, "Prospecting for Hash Functions" (2018)."""


def nearest(values: Tensor) -> Tensor:
    """Round to the nearest value of bfloat16, ties to even, as a cast does.

    Args:
        values: float32, any shape.

    Returns:
        float32 values that a cast to bfloat16 does not change.
    """
    power = _last_place(values) * 8388608.0
    # The lower limit is for subnormals, which some processors treat as zero, and for NaN and infinities.
    power = torch.where(power > 2.0**-126, power, 2.0**-126)
    # The quotient is exact, with the 8 bits of bfloat16 before its point.
    return torch.round(values / power * 128.0) * 0.0078125 * power


def stochastic(values: Tensor, seed: Tensor | int, half: int = 0) -> Tensor:
    """Round up or down at random, so that the mean of the results is the value itself.

    Before the cast, an odd number of units in the last place is added, less than half of the step of bfloat16. So the
    sum is exact, and values of bfloat16 are unchanged. The probability of rounding up is right to 2**-16.

    Args:
        values: float32 (n,).
        seed: a signed 32-bit integer from `next_seed`, or an int32 tensor of shape () with one.
        half: 0 or 1: the half of the random bits of a seed to use. Two tensors may share a seed.

    Returns:
        bfloat16 (n,).
    """
    bits = _hash(_indices(values), seed)
    # The upper 16 bits, with the last one set: an odd number from -32767 to 32767.
    odd = (((bits * 65536 if half else bits) & -65536) | 65536).to(torch.float32) * 2.0**-16
    last = _last_place(values)
    moved = values + odd * torch.where(last > 0.0, last, 2.0**-149)
    size = moved.abs()
    # Below a power of two the step of bfloat16 is half as large: values this near to it are rounded to it.
    moved = torch.where(size < last * 8388608.0, values, moved)
    # The limit is the largest bfloat16 value plus half a step; the product is rounded to that largest value.
    moved = torch.where(size < 255.5 * 2.0**120, moved, values * (1.0 - 2.0**-9))
    return moved.to(torch.bfloat16)


def next_seed(count: int, shard: int = 0) -> tuple[int, int]:
    """Return the next count, and its seed as a signed 32-bit integer (SplitMix64: Steele, Lea, Flood, 2014).

    The count is the same in all processes, and so in a checkpoint; each shard of a weight has different seeds.
    """
    count = (count + 1) & _64_BITS
    mixed = ((count * 0x9E3779B97F4A7C15) ^ (shard * 0xD1B54A32D192ED03)) & _64_BITS
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & _64_BITS
    return count, ((mixed ^ (mixed >> 31)) & _32_BITS) - 2**31


def seeds(states: dict[str, Any], count: int, parts: int = 1) -> Tensor:
    """Return seeds, int32 (parts, count), different ones for each part of a weight that is stepped in parts.

    The count in the parameter's states increases by the same number for any number of parts.
    """
    start = states[SEED]
    drawn_seeds = []
    for part in range(parts):
        states[SEED] = start
        for _ in range(count):
            states[SEED], seed = next_seed(states[SEED], part << 32)
            drawn_seeds.append(seed)
    return torch.tensor(drawn_seeds, dtype=torch.int32).view(parts, count)


def _last_place(values: Tensor) -> Tensor:
    """Return the distance to the next value toward zero: a unit in the last place; half a unit for powers of two.

    The product is inexact and has to be rounded separately: Inductor forbids compilers to fuse it with the difference.
    """
    return (values - values * (1.0 - 2.0**-24)).abs()


def _indices(values: Tensor) -> Tensor:
    """Return 0, 1, 2 ... as int32 (n,).

    A compiled program adds indices within a block, read from memory, to the first index of the block: Inductor would
    compute an `arange` without vector instructions.
    """
    count = values.shape[0]
    if not torch.compiler.is_compiling():
        return torch.arange(count, dtype=torch.int32, device=values.device)
    blocks = torch.arange(1 << 25, dtype=torch.int32, device=values.device) * 64
    first = blocks.unsqueeze(1).expand(1 << 25, 64).reshape(1 << 31)[:count]
    within = _BLOCK.to(values.device).unsqueeze(0).expand(1 << 25, 64).reshape(1 << 31)[:count]
    return first + within


with _torch.isolated():  # this module may be imported within a transform
    _BLOCK: Final = torch.arange(64, dtype=torch.int32, device="cpu")


def _hash(indices: Tensor, seed: Tensor | int) -> Tensor:
    """Hash int32 to int32 so that each bit of an index and of the seed changes half of the bits; products wrap."""
    mixed = ((_upper(indices) ^ indices) * _FACTOR) ^ seed
    mixed = (_upper(mixed) ^ mixed) * _FACTOR
    return _upper(mixed) ^ mixed


def _upper(values: Tensor) -> Tensor:
    """Return the upper 16 bits of int32."""
    return (values >> 16) & 0xFFFF
