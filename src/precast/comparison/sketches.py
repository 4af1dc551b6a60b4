"""The measurement of a tensor in a recording: a fingerprint of its bits, statistics, and a count sketch.

A *sketch* is `SIZE` sums of the elements with random signs, in float64. The sketch of a difference is the difference of
the sketches, and its squared length estimates the squared distance of two tensors that were never in one process. The
estimate is unbiased. Its relative standard deviation is ``sqrt(2 / SIZE)``, 12.5%, for a difference that is spread
over many elements; a difference in one element is estimated exactly.

Invariants:

- equal tensors have equal fingerprints in every process, on every device and whatever their strides; the other numbers
  are equal up to their own rounding;
- the fingerprint is a sum modulo 2**64 of the elements' bits with odd random factors. A change of one element always
  changes it, and any other change does except with a probability below 2**-32;
- an element that is infinite or NaN counts as 0 in the sketch and in the statistics, which count it by itself.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from precast import _torch
from precast.weights.native.api import native_engine

__all__ = ["NUMBERS", "SIZE", "measure"]

SIZE: Final = 127
"""The numbers of a sketch. It is prime, so that no channel of a usual layout falls into one sum alone."""
_BLOCK: Final = SIZE * SIZE
"""The elements with signs and factors of their own."""
_OFFSETS: Final = 8192
_TABLE: Final = _BLOCK + _OFFSETS
_LANES: Final = 4
"""The elements beyond a block that the compiled measurement may read of the tables."""
_AT_ONCE: Final = 64 * _BLOCK
"""The elements that are measured at once, so that little memory is needed."""
_NATIVE: Final = (torch.float32, torch.bfloat16)
_WORDS: Final = {1: torch.uint8, 2: torch.int16}
NUMBERS: Final = 6 + SIZE
"""The float64 numbers of a measurement.

They are the bits of the fingerprint; of the finite elements the smallest, the largest, the sum and the sum of squares;
the number of other elements; and the sketch.
"""


def measure(tensor: Tensor) -> Tensor:
    """Return the measurement of a dense tensor: `NUMBERS` float64 values on its device. No device is waited for."""
    with torch.no_grad():
        values = tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
        if values.is_complex():
            values = torch.view_as_real(values).reshape(-1)
        device = values.device
        result = torch.zeros(NUMBERS, dtype=torch.float64, device=device)
        api = native_engine.api if device.type == "cpu" and values.dtype in _NATIVE else None
        if api is not None and values.numel():
            tables = _factors(device).data_ptr(), _sign_tables(device, torch.float32).data_ptr()
            is_bfloat16 = values.dtype is torch.bfloat16
            api.measure(values.data_ptr(), values.numel(), is_bfloat16, *tables, result.data_ptr())
        elif values.numel():
            _measure_blocks(values, result)
        return result


def _measure_blocks(values: Tensor, result: Tensor) -> None:
    """Measure a tensor with few kernels for many blocks, and without waiting for its device."""
    device = values.device
    # The bits as integers of at most 32 bits; a wider element is several of them.
    words = values.view(_WORDS.get(values.element_size(), torch.int32))
    for first, blocks in _blocks(words, torch.int64):
        numbers = [_signed(_mixed(2 * n + 1)) for n in range(first, first + len(blocks))]
        parts = (blocks * _factors(device)[:_BLOCK]).sum(1)
        result[:1].view(torch.int64)[0] += (parts * torch.tensor(numbers, device=device)).sum()
    result[1], result[2] = math.inf, -math.inf
    for first, blocks in _blocks(values, torch.float64):
        infinite = blocks.isfinite().logical_not()
        blocks.masked_fill_(infinite, 0.0)
        low, high = blocks.view(-1)[: values.numel() - first * _BLOCK].aminmax()
        result[1], result[2] = torch.minimum(result[1], low), torch.maximum(result[2], high)
        result[3:6] += torch.stack([blocks.sum(), blocks.square().sum(), infinite.sum()])
        signs = torch.stack([_signs(device, n) for n in range(first, first + len(blocks))])
        result[-SIZE:] += (blocks * signs).view(-1, SIZE).sum(0)


def _blocks(values: Tensor, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """Yield the number of a first block and a matrix of blocks in a dtype, with zeros at the end of the last one."""
    for start in range(0, values.numel(), _AT_ONCE):
        part = values[start : start + _AT_ONCE]
        blocks = part.new_zeros((-(-len(part) // _BLOCK), _BLOCK), dtype=dtype)
        blocks.view(-1)[: len(part)] = part
        yield start // _BLOCK, blocks


def _mixed(number: int) -> int:
    """Return an odd 64-bit number that looks random: SplitMix64."""
    mixed = number * 0x9E3779B97F4A7C15 % 2**64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
    return (mixed ^ (mixed >> 31)) | 1


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


@functools.cache
def _factors(device: torch.device) -> Tensor:
    """Return the factors of the words of a block."""
    with _torch.isolated():
        numbers = [_signed(_mixed(2 * number)) for number in range(1, _BLOCK + _LANES + 1)]
        return torch.tensor(numbers, dtype=torch.int64, device=device)


@functools.cache
def _sign_tables(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return two tables of random signs, one after the other, each longer than a block."""
    with _torch.isolated():
        count = 2 * _TABLE + _LANES
        signs = [1 - (_mixed(2**40 + number) >> 32 & 1) * 2 for number in range(count)]
        return torch.tensor(signs, dtype=dtype, device=device)


def _signs(device: torch.device, block: int) -> Tensor:
    """Return the signs of a block's elements: the product of two parts, so that two blocks share no pattern."""
    tables = _sign_tables(device, torch.float64)
    offset = _mixed(2**41 + block)
    a, b = (offset >> 20) % _OFFSETS, (offset >> 40) % _OFFSETS
    return tables[a : a + _BLOCK] * tables[_TABLE + b : _TABLE + b + _BLOCK]
