"""From float32 to bfloat16, so that what is lost is lost fairly, or kept beside.

Invariants:

- a compiler that removes a cast to bfloat16 and back, as Inductor does, keeps the rounding: it is arithmetic in
  float32, of which each operation is exact, or rounds as it has to. Bits are not looked at, because Inductor would take
  a view in another dtype number by number, which costs more than all that is done here;
- what is rounded stochastically depends on the number, its place and the seed alone: a program gives the same in any
  process, however many threads it has;
- infinities and NaN stay what they are, and nothing that is finite becomes infinite stochastically.

"""

from __future__ import annotations

from typing import Any, Final, Literal

import torch
from torch import Tensor

from precast import _torch

__all__ = ["OF_ROUNDING", "REST", "SEED", "Rounding", "nearest", "next_seed", "seeds", "stochastic"]

Rounding = Literal["kahan", "stochastic"]
"""How a weight in bfloat16 learns: with what was rounded away beside it, or rounded up or down by chance."""
REST: Final = "rounded_away"
SEED: Final = "rounding_seed"
OF_ROUNDING: Final = (REST, SEED)
"""What a parameter has among its optimizer's states that is not the optimizer's: bfloat16 (n,), and a whole number."""

_64_BITS: Final = 0xFFFFFFFFFFFFFFFF
_32_BITS: Final = 0xFFFFFFFF
_FACTOR: Final = 0x45D9F3B
"""Of the hash, with shifts by 16: C. Wellons, "Prospecting for Hash Functions" (2018)."""


def nearest(numbers: Tensor) -> Tensor:
    """Rounds to the nearest number of bfloat16, and to the even one of two, as a cast does.

    Args:
        numbers: float32, any shape.

    Returns:
        float32, of which a cast to bfloat16 changes nothing.
    """
    power = _last_place(numbers) * 8388608.0
    # 8 bits are counted from here, also where the processor takes what is smaller for zero, and for NaN and infinities.
    power = torch.where(power > 2.0**-126, power, 2.0**-126)
    # The quotient is exact, and has 8 bits before its point: those that bfloat16 keeps.
    return torch.round(numbers / power * 128.0) * 0.0078125 * power


def stochastic(numbers: Tensor, seed: Tensor | int, half: int = 0) -> Tensor:
    """Rounds up or down by chance, so that the mean of the results is the number itself.

    What is added to a number before it is cast is an odd number of units of its last place, less than half of what
    bfloat16 resolves: so the sum is exact, and no number of bfloat16 is moved. The chance to go up is right to 2**-16.

    Args:
        numbers: float32 (n,).
        seed: a whole number of 32 bits with a sign, as `next_seed` gives it; or a tensor of one, int32 and of shape ().
        half: 0 or 1: which half of the bits that come from a seed. Two tensors may share one.

    Returns:
        bfloat16 (n,).
    """
    drawn = _hash(_places(numbers), seed)
    # The upper 16 bits, the last of them set: an odd number from -32767 to 32767.
    odd = (((drawn * 65536 if half else drawn) & -65536) | 65536).to(torch.float32) * 2.0**-16
    last = _last_place(numbers)
    moved = numbers + odd * torch.where(last > 0.0, last, 2.0**-149)
    size = moved.abs()
    # Below a power of two bfloat16 resolves twice as much: what is so near to it is rounded to it.
    moved = torch.where(size < last * 8388608.0, numbers, moved)
    # The largest number of bfloat16 and half of what it resolves there; the product is rounded to that largest number.
    moved = torch.where(size < 255.5 * 2.0**120, moved, numbers * (1.0 - 2.0**-9))
    return moved.to(torch.bfloat16)


def next_seed(count: int, shard: int = 0) -> tuple[int, int]:
    """A count that goes on, and the seed for it, 32 bits with a sign (SplitMix64: Steele, Lea, Flood, 2014).

    The count is the same in all processes, and so in a checkpoint; each shard of a weight has other seeds for it.
    """
    count = (count + 1) & _64_BITS
    mixed = ((count * 0x9E3779B97F4A7C15) ^ (shard * 0xD1B54A32D192ED03)) & _64_BITS
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & _64_BITS
    return count, ((mixed ^ (mixed >> 31)) & _32_BITS) - 2**31


def seeds(its: dict[str, Any], number: int, shard: int = 0, parts: int = 1) -> Tensor:
    """Seeds, int32 (parts, number), others for each part of a weight that is stepped part by part.

    The count among the states of a parameter goes on, by as much however many parts there are.
    """
    begun = its[SEED]
    drawn = []
    for part in range(parts):
        its[SEED] = begun
        for _ in range(number):
            its[SEED], seed = next_seed(its[SEED], shard + (part << 32))
            drawn.append(seed)
    return torch.tensor(drawn, dtype=torch.int32).view(parts, number)


def _last_place(numbers: Tensor) -> Tensor:
    """How far the next number toward zero is: a unit of the last place; half a unit for powers of two; 0 for the least.

    The product is not exact and has to be rounded by itself: Inductor forbids compilers to fuse it with the difference.
    """
    return (numbers - numbers * (1.0 - 2.0**-24)).abs()


def _places(numbers: Tensor) -> Tensor:
    """0, 1, 2 ... as int32 (n,).

    A compiled program adds the numbers of a block, which it reads, to the block's, which is one for all of them:
    Inductor would make each number of an `arange` by itself.
    """
    count = numbers.shape[0]
    if not torch.compiler.is_compiling():
        return torch.arange(count, dtype=torch.int32, device=numbers.device)
    blocks = torch.arange(1 << 25, dtype=torch.int32, device=numbers.device) * 64
    first = blocks.unsqueeze(1).expand(1 << 25, 64).reshape(1 << 31)[:count]
    within = _BLOCK.to(numbers.device).unsqueeze(0).expand(1 << 25, 64).reshape(1 << 31)[:count]
    return first + within


with _torch.isolated():  # this module may be imported within a transform
    _BLOCK: Final = torch.arange(64, dtype=torch.int32, device="cpu")


def _hash(places: Tensor, seed: Tensor | int) -> Tensor:
    """int32 -> int32, in which each bit of a place and of the seed changes half of the bits; products wrap."""
    mixed = ((_upper(places) ^ places) * _FACTOR) ^ seed
    mixed = (_upper(mixed) ^ mixed) * _FACTOR
    return _upper(mixed) ^ mixed


def _upper(numbers: Tensor) -> Tensor:
    """The upper 16 bits of int32."""
    return (numbers >> 16) & 0xFFFF
