"""Values of a weight that are recorded before it is cast, to find writes that its version counter does not count.

The compiled kernels have the same (`native/samples.h`); this one is used without the library.

Invariants:

- there is one position in each of `_RECORDED` equal parts of the weight, from a fixed sequence that no generator of
  PyTorch uses. Every second position is preferably one of a value that is not zero;
- a check compares `_COMPARED` values, one in each eighth of the weight; the next check compares others. A weight with
  at most `_RECORDED` elements is compared as a whole;
- only weights on the CPU have samples: elsewhere a comparison would wait;
- nothing outside of the storage is read, and no operation of PyTorch runs.
"""

from __future__ import annotations

import itertools
from ctypes import c_uint32
from typing import Final

import torch
from torch import Tensor

from precast._torch import without_torch_function

__all__ = ["WeightSamples"]

_RECORDED: Final = 32
_COMPARED: Final = 8
_ATTEMPTS: Final = 8

_numbers: Final = itertools.count()


class WeightSamples:
    """The recorded values of one weight, and their positions in memory."""

    __slots__ = ("_span", "_turn", "_words")

    def __init__(self) -> None:
        self._words: list[tuple[int, int]] = []
        """The offset of each position from the first element, in bytes, and the value there as a word."""
        self._span = 0
        """The bytes from the first element in memory to the end of the last one."""
        self._turn = 0

    def record_samples(self, parameter: Tensor) -> None:
        """Record values of the parameter, before the copy is written."""
        self._words = []
        with without_torch_function():
            shape, strides, size = parameter.shape, parameter.stride(), parameter.element_size()
            self._span = size * (
                1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
            )
            address = _readable_address(parameter, self._span) if parameter.numel() else None
        if address is not None:
            self._words = [
                _first_nonzero(address, [_offset(p, shape, strides) * size for p in positions])
                for positions in _positions(shape.numel())
            ]

    def match_samples(self, parameter: Tensor, *, compares_all: bool) -> bool:
        """Return True if the parameter has the recorded values, all of them or the next ones."""
        if not self._words:
            return True
        with without_torch_function():
            address = _readable_address(parameter, self._span)
            compares_all = compares_all or parameter.numel() <= _RECORDED
        self._turn += 1
        rounds = _RECORDED // _COMPARED
        start = self._turn % rounds * _COMPARED
        words = self._words if compares_all else self._words[start : start + _COMPARED]
        return address is not None and all(
            _word(address + offset) == word for offset, word in words
        )


def _readable_address(parameter: Tensor, span: int) -> int | None:
    """Return the address of the first element; None if the values cannot be read."""
    if not parameter.is_cpu or parameter.dtype is not torch.float32:
        return None
    storage, address = parameter.untyped_storage(), parameter.data_ptr()
    end = address - storage.data_ptr() + span
    return address if address and end <= storage.nbytes() else None


def _positions(elements: int) -> list[list[int]]:
    """Return the candidates for each position, in the order in which checks compare them."""
    if elements <= _RECORDED:
        return [[position] for position in range(elements)]
    bounds = [elements * part // _RECORDED for part in range(_RECORDED + 1)]
    parts = [
        part
        for first in range(_RECORDED // _COMPARED)
        for part in range(first, _RECORDED, _RECORDED // _COMPARED)
    ]
    return [
        [
            bounds[part] + _mixed(next(_numbers)) % (bounds[part + 1] - bounds[part])
            for _ in range(_ATTEMPTS if index % 2 else 1)
        ]
        for index, part in enumerate(parts)
    ]


def _first_nonzero(address: int, offsets: list[int]) -> tuple[int, int]:
    """Return the first offset whose value is not zero, or the last one, with its value."""
    words = ((offset, _word(address + offset)) for offset in offsets)
    last = offsets[-1]
    is_nonzero = 0x7FFF_FFFF  # all bits but the sign
    return next((w for w in words if w[1] & is_nonzero), (last, _word(address + last)))


def _offset(position: int, shape: torch.Size, strides: tuple[int, ...]) -> int:
    """Return the place in memory of an element that is counted in the order of dimensions."""
    offset = 0
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        position, index = divmod(position, size)
        offset += index * stride
    return offset


def _word(address: int) -> int:
    return c_uint32.from_address(address).value


def _mixed(number: int) -> int:
    """Return the next value of SplitMix64: successive numbers give independent ones."""
    mask = (1 << 64) - 1
    number = (number + 1) * 0x9E3779B97F4A7C15 & mask
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & mask
    number = (number ^ number >> 27) * 0x94D049BB133111EB & mask
    return number ^ number >> 31
