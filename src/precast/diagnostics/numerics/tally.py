"""Counts a tensor's numbers on its device: how many in each bin of magnitudes, the largest, the sum of squares.

Invariants:
- nothing waits for the device until `Tally.read`, but off the CPU where the program wants deterministic algorithms;
- a tensor is looked at in pieces, so that memory does not grow with it; neither it nor its graph is changed;
- a number is counted as what it is in float32: those of float16, bfloat16 and 8 bits exactly, those of float64 rounded,
  and where float32 has no such number, as its smallest or its largest.
"""

from __future__ import annotations

import math
import struct
from array import array
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from precast import _torch
from precast.diagnostics.numerics.bins import BINS, SHIFT, Magnitudes
from precast.diagnostics.numerics.formats import FORMATS
from precast.diagnostics.numerics.lost_updates import Updates
from precast.grad_scaler.memory import memory_of

__all__ = ["NARROW", "Counts", "Key", "Tally", "countable"]

Key = tuple[str, str]
"""A tensor of a model: its kind ("output", "input", "gradient" or "parameter") and its name."""

NARROW: Final = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
"""The dtypes for which PyTorch has no comparisons."""
_USUAL: Final = frozenset({torch.float32, torch.float16, torch.bfloat16})
_LAYOUTS: Final = frozenset(
    {torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr}
    | {torch.sparse_bsc}
)

_PIECE: Final = {"cpu": 1 << 16}  # stays in a core's cache; elsewhere each piece costs launches
_LARGE_PIECE: Final = 1 << 22  # float32 counts of a piece are exact up to 2**24
_INFINITY: Final = 0x7F800000
_KEYS: Final = (0x7FFFFFFF >> SHIFT) + 2  # zero, the bins, and those of infinity and NaN

# The smallest normal number and the largest. Those of float64 are no numbers of float32, so none equals them.
_LIMITS: Final = {
    getattr(torch, name): (format.smallest_normal, format.largest)
    for name, format in FORMATS.items()
} | {torch.float64: (0.0, math.nan)}


def _key(value: float) -> int:
    """Where a magnitude of float32 is counted."""
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return ((bits - 1) >> SHIFT) + 1


_KEYS_OF_LIMITS: Final = {dtype: tuple(map(_key, limits)) for dtype, limits in _LIMITS.items()}


@dataclass(frozen=True, slots=True)
class Counts:
    """What was counted of one tensor, or of several together."""

    elements: int
    zeros: int
    lost: int | None
    """Zeros that are known to be made by underflow; None where that cannot be known."""
    subnormal: int
    infinite: int
    saturated: int
    """How many equal the largest number of the tensor's dtype."""
    nan: int
    squares: float
    """The sum of squares of the finite ones."""
    magnitudes: Magnitudes
    updates: Updates | None = None
    """What became of a parameter's updates; None where that is not known, or where it is no parameter."""
    average: float | None = None
    """Of an average of the parameter that is stored in 16 bits: the share of its values that an update left as they
    were; None if there is none."""

    @property
    def rms(self) -> float:
        """Root mean square of the finite ones."""
        finite = self.elements - self.infinite - self.nan
        return math.sqrt(self.squares / finite) if finite else 0.0


class Tally:
    """Sums of one tensor's counts, or of several tensors'."""

    __slots__ = ("_lost", "_sums", "elements")

    def __init__(self) -> None:
        self.elements = 0
        self._sums: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
        """Counts by key, those of `_special`, the sum of squares, and the largest."""
        self._lost: Tensor | None = None

    @torch.no_grad()
    def add(self, tensor: Tensor) -> None:
        """Counts a tensor that is real, dense and floating-point (`countable` gives such)."""
        flat = tensor.detach().reshape(-1)
        self.elements += flat.numel()
        for piece in flat.split(_PIECE.get(flat.device.type, _LARGE_PIECE)):
            if piece.numel():
                self._add(_in_float32(piece), tensor.dtype)

    def add_lost(self, count: Tensor | None) -> None:
        """Adds zeros that are known to be made by underflow, an integer of shape (); None adds nothing."""
        if count is not None:
            self._lost = count if self._lost is None else self._lost + count

    def read(self, power: int = 0) -> Counts:
        """The sums of numbers that stand for themselves times ``2**power``; waits for the device."""
        if self._sums is None:
            return Counts(self.elements, 0, None, 0, 0, 0, 0, 0.0, Magnitudes(0, array("q"), 0.0))
        bins = self._sums[0].cpu()
        subnormal, infinite, saturated = self._sums[1].tolist()
        squares, largest = map(float, self._sums[2:])
        used = bins[1 : BINS + 1].nonzero().flatten()
        low, high = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 0)
        counts = array("q", bins[low + 1 : high + 1].tolist())
        if high == BINS and infinite:  # infinity is the upper edge of the last bin
            counts[-1] -= infinite
        return Counts(
            elements=self.elements,
            zeros=int(bins[0]),
            lost=None if self._lost is None else int(self._lost),
            subnormal=subnormal,
            infinite=infinite,
            saturated=saturated,
            nan=int(bins[BINS + 1 :].sum()),
            squares=math.ldexp(squares, 2 * power),
            magnitudes=Magnitudes(low, counts, largest, power),
        )

    def _add(self, piece: Tensor, dtype: torch.dtype) -> None:
        magnitude = piece.abs()
        bits = magnitude.view(torch.int32)
        # One less, so that an edge belongs to the bin below it; the shift of zero's -1 is -1.
        bins = _counted((bits - 1).bitwise_right_shift_(SHIFT).add_(1))
        special = _special(magnitude, bits, bins, dtype)
        if _may_have(bins, BINS, _KEYS):
            magnitude.nan_to_num_(0.0, 0.0, 0.0)
        largest = magnitude.amax()
        wide = magnitude.to(torch.float32 if piece.device.type == "mps" else torch.float64)
        squares = torch.dot(wide, wide)
        if self._sums is not None:
            # Not in place: a sum that was made in inference mode may not be written outside of it.
            bins, special = self._sums[0] + bins, self._sums[1] + special
            squares, largest = self._sums[2] + squares, torch.maximum(self._sums[3], largest)
        self._sums = bins, special, squares, largest


def countable(tensor: Tensor) -> Tensor | None:
    """A tensor's numbers as `memory_of` has them; None for a tensor that is not looked at.

    Not looked at are integers, tensors without data, nested ones, and subclasses other than `DTensor`.
    """
    if tensor.is_nested:
        return None
    kind = type(tensor)
    if kind is Tensor and tensor.dtype in _USUAL and tensor.layout is torch.strided:
        return None if tensor.is_meta else tensor
    if kind is not Tensor and kind is not torch.nn.Parameter and not _torch.is_dtensor(tensor):
        return None
    if tensor.layout not in _LAYOUTS:
        return None
    numbers = memory_of(tensor)
    return None if numbers.dtype not in _LIMITS or numbers.is_meta else numbers


def _in_float32(piece: Tensor) -> Tensor:
    if piece.dtype is not torch.float64:
        return piece.float()
    held = piece.abs().clamp_(FORMATS["float32"].smallest_subnormal, FORMATS["float32"].largest)
    return torch.where(piece.isfinite() & (piece != 0), held, piece).float()


def _special(magnitude: Tensor, bits: Tensor, bins: Tensor, dtype: torch.dtype) -> Tensor:
    """How many are subnormal, infinite, saturated, of shape (3,)."""
    smallest, largest = _LIMITS[dtype]
    low, high = _KEYS_OF_LIMITS[dtype]
    found = [bins.new_zeros(())] * 3
    if _may_have(bins, 1, low + 1):
        found[0] = torch.count_nonzero((magnitude < smallest) & (bits != 0))
    if _may_have(bins, BINS, BINS + 1):
        found[1] = torch.count_nonzero(bits == _INFINITY)
    if _may_have(bins, high, high + 1):
        found[2] = torch.count_nonzero(magnitude == largest)
    return torch.stack(found)


def _may_have(bins: Tensor, begin: int, end: int) -> bool:
    """Whether something may be counted there: only the CPU can look without waiting."""
    return bins.device.type != "cpu" or bool(bins[begin:end].any())


def _counted(keys: Tensor) -> Tensor:
    if keys.device.type == "cpu" or torch.are_deterministic_algorithms_enabled():
        return torch.bincount(keys, minlength=_KEYS)
    return _counted_without_waiting(keys)


def _counted_without_waiting(keys: Tensor) -> Tensor:
    """As `bincount`, which waits for the largest key off the CPU; up to 2**24 keys."""
    # In the middle of its bin, a key is counted there whatever the rounding.
    return torch.histc(keys.float().add_(0.5), bins=_KEYS, min=0, max=_KEYS).long()
