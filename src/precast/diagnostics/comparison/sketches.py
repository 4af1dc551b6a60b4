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
from typing import Final, NamedTuple

import torch
from torch import Tensor

from precast import _torch

__all__ = ["NUMBERS", "SIZE", "Statistics", "measure", "relative_error"]

SIZE: Final = 127
"""The numbers of a sketch. It is prime, so that no channel of a usual layout falls into one sum alone."""
_ROWS: Final = 127
_BLOCK: Final = SIZE * _ROWS
"""The elements that are summed at once: they fit into a processor's cache, and PyTorch uses one thread for them."""
_OFFSETS: Final = 8192
_STATISTICS: Final = 5
NUMBERS: Final = 1 + _STATISTICS + SIZE
"""The float64 numbers of a measurement: the fingerprint's bits, the statistics, and the sketch."""


class Statistics(NamedTuple):
    """The statistics of a tensor's finite elements.

    Attributes:
        low: the smallest element.
        high: the largest element.
        sum: the sum of the elements.
        squares: the sum of the squares of the elements.
        nonfinite: the number of elements that are infinite or NaN.
    """

    low: float
    high: float
    sum: float
    squares: float
    nonfinite: float


def relative_error() -> float:
    """Return the standard deviation of an estimated squared distance, relative to that distance."""
    return math.sqrt(2 / SIZE)


def measure(tensor: Tensor) -> Tensor:
    """Return the measurement of a dense tensor: `NUMBERS` float64 values on its device. No device is waited for."""
    with torch.no_grad():
        values = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
        if values.is_complex():
            values = torch.view_as_real(values).reshape(-1)
        result = torch.zeros(NUMBERS, dtype=torch.float64, device=values.device)
        if not values.numel():
            return result
        words = _words(values)
        if values.device.type == "cpu":
            _measure_blocks(values, words, result)
        else:
            _measure_at_once(values, words, result)
        return result


def _words(values: Tensor) -> Tensor:
    """Return the bits of elements as integers of at most 32 bits."""
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}[values.element_size()]
    return values.view(dtype)


def _numbers(values: Tensor) -> Tensor:
    """Return elements as float32, or as float64 if float32 cannot hold them."""
    if values.dtype in (torch.float64, torch.int64, torch.int32):
        return values.double()
    return values if values.dtype is torch.float32 else values.float()


def _measure_blocks(values: Tensor, words: Tensor, result: Tensor) -> None:
    """Measure a tensor on the CPU block by block, without memory for a second copy of it."""
    sketch = result[1 + _STATISTICS :]
    low, high, total, squares, nonfinite = math.inf, -math.inf, 0.0, 0.0, 0
    fingerprint = 0
    factors = _factors("cpu")
    for number, start in enumerate(range(0, words.numel(), _BLOCK)):
        block = words[start : start + _BLOCK]
        part = int(torch.dot(block.long(), factors[: block.numel()]))
        fingerprint = (fingerprint + part * _mixed(2 * number + 1)) % 2**64
    for number, start in enumerate(range(0, values.numel(), _BLOCK)):
        block = _numbers(values[start : start + _BLOCK])
        smallest, largest = (float(each) for each in block.aminmax())
        if not (math.isfinite(smallest) and math.isfinite(largest)):
            finite = block.isfinite()
            nonfinite += block.numel() - int(finite.sum())
            block = torch.where(finite, block, 0.0)
            smallest, largest = (float(each) for each in block.aminmax())
        low, high = min(low, smallest), max(high, largest)
        total += float(block.sum())
        squares += float(torch.linalg.vector_norm(block)) ** 2
        signed = block * _signs("cpu", block.dtype, number)[: block.numel()]
        whole = signed.numel() // SIZE * SIZE
        sketch += signed[:whole].double().view(-1, SIZE).sum(0)
        sketch[: signed.numel() - whole] += signed[whole:]
    result[1 : 1 + _STATISTICS] = torch.tensor(
        [low, high, total, squares, nonfinite], dtype=torch.float64
    )
    result[:1].view(torch.int64)[0] = _signed(fingerprint)


def _measure_at_once(values: Tensor, words: Tensor, result: Tensor) -> None:
    """Measure a tensor on another device, with few kernels and without waiting for it."""
    device = values.device
    blocks = _padded(words).long() * _factors(device)
    mixed = torch.tensor(
        [_signed(_mixed(2 * number + 1)) for number in range(len(blocks))], device=device
    )
    result[:1].view(torch.int64)[0] = (blocks.sum(1) * mixed).sum()
    numbers = _numbers(values)
    finite = numbers.isfinite()
    numbers = torch.where(finite, numbers, 0.0)
    doubles = numbers.double()
    result[1], result[2] = numbers.aminmax()
    result[3], result[4] = doubles.sum(), doubles.square().sum()
    result[5] = numbers.numel() - finite.sum()
    blocks = _padded(doubles)
    signs = torch.stack([_signs(device, torch.float64, n) for n in range(len(blocks))])
    result[1 + _STATISTICS :] = (blocks * signs).view(-1, SIZE).sum(0)


def _padded(values: Tensor) -> Tensor:
    """Return elements in rows of one block, with zeros at the end."""
    blocks = -(-values.numel() // _BLOCK)
    padded = values.new_zeros(blocks * _BLOCK)
    padded[: values.numel()] = values
    return padded.view(blocks, _BLOCK)


def _mixed(number: int) -> int:
    """Return an odd 64-bit number that looks random: SplitMix64."""
    mixed = number * 0x9E3779B97F4A7C15 % 2**64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
    return (mixed ^ (mixed >> 31)) | 1


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


@functools.cache
def _factors(device: torch.device | str) -> Tensor:
    """Return the factors of the words of a block."""
    with _torch.isolated():
        numbers = [_signed(_mixed(2 * number)) for number in range(1, _BLOCK + 1)]
        return torch.tensor(numbers, dtype=torch.int64, device=device)


@functools.cache
def _sign_tables(device: torch.device | str, dtype: torch.dtype) -> Tensor:
    """Return two rows of random signs, each longer than a block."""
    with _torch.isolated():
        count = 2 * (_BLOCK + _OFFSETS)
        signs = [1 - (_mixed(2**40 + number) >> 32 & 1) * 2 for number in range(count)]
        return torch.tensor(signs, dtype=dtype, device=device).view(2, -1)


def _signs(device: torch.device | str, dtype: torch.dtype, block: int) -> Tensor:
    """Return the signs of a block's elements: the product of two parts, so that two blocks share no pattern."""
    tables = _sign_tables(device, dtype)
    offset = _mixed(2**41 + block)
    a, b = (offset >> 20) % _OFFSETS, (offset >> 40) % _OFFSETS
    return tables[0, a : a + _BLOCK] * tables[1, b : b + _BLOCK]
