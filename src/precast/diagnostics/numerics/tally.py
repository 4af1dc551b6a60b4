"""Statistics of a tensor, computed on its device: a histogram of magnitudes, the maximum, the sum of squares.

Invariants:
- nothing waits for the device until `TensorTally.read`, except off the CPU with deterministic algorithms;
- a tensor is processed in pieces, so that memory does not grow with it; neither it nor its graph is changed;
- values are counted in float32: exact for float16, bfloat16 and 8 bits; float64 is rounded, and values outside of
  float32's range count as its smallest or largest value.
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
from precast.diagnostics.numerics.lost_updates import UpdateLoss
from precast.grad_scaler.memory import memory_of

__all__ = ["TensorCounts", "TensorKey", "TensorTally", "comparable", "countable"]

TensorKey = tuple[str, str]
"""A tensor of a model: its kind ("output", "input", "gradient" or "parameter") and its name."""

_EIGHT_BIT: Final = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
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

# The smallest normal value and the largest. Those of float64 do not exist in float32, so no value equals them.
_LIMITS: Final = {
    getattr(torch, name): (format.smallest_normal, format.largest)
    for name, format in FORMATS.items()
} | {torch.float64: (0.0, math.nan)}


def _key(value: float) -> int:
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return ((bits - 1) >> SHIFT) + 1


_KEYS_OF_LIMITS: Final = {dtype: tuple(map(_key, limits)) for dtype, limits in _LIMITS.items()}


@dataclass(frozen=True, slots=True)
class TensorCounts:
    """The counts of one tensor, or of several together."""

    elements: int
    zeros: int
    lost: int | None
    """Zeros caused by underflow; None if that is unknown."""
    subnormal: int
    infinite: int
    saturated: int
    """The number of values that equal the largest value of the tensor's dtype."""
    nan: int
    squares: float
    """The sum of squares of the finite values."""
    magnitudes: Magnitudes
    updates: UpdateLoss | None = None
    """The loss of a parameter's updates; None if unknown, or for other tensors."""
    average: float | None = None
    """The share of the values of the parameter's 16-bit average that an update did not change; None without one."""

    @property
    def rms(self) -> float:
        """The root mean square of the finite values."""
        finite = self.elements - self.infinite - self.nan
        return math.sqrt(self.squares / finite) if finite else 0.0


class TensorTally:
    """The sums over one tensor, or several."""

    __slots__ = ("elements", "sums")

    def __init__(self) -> None:
        self.elements = 0
        self.sums: dict[str, Tensor] = {}
        """The histogram ("bins"), the counts of `_special` ("special"), the sum of squares ("squares"), the maximum
        ("largest") and, if it is known, the number of zeros caused by underflow ("lost")."""

    @torch.no_grad()
    def add(self, tensor: Tensor) -> None:
        """Count a real, dense, floating-point tensor (`countable` returns such a tensor)."""
        flat = tensor.detach().reshape(-1)
        self.elements += flat.numel()
        for piece in flat.split(_PIECE.get(flat.device.type, _LARGE_PIECE)):
            if piece.numel():
                self._add(_in_float32(piece), tensor.dtype)

    def add_lost(self, count: Tensor | None) -> None:
        """Add the number of zeros caused by underflow, of shape (); None adds nothing."""
        if count is not None:
            self._add_to("lost", count)

    def read(self, power: int = 0) -> TensorCounts:
        """Return the counts of values in units of ``2**power``. Waits for the device."""
        sums = self.sums
        if "bins" not in sums:
            return TensorCounts(
                self.elements, 0, None, 0, 0, 0, 0, 0.0, Magnitudes(0, array("q"), 0.0)
            )
        bins = sums["bins"].cpu()
        subnormal, infinite, saturated = sums["special"].tolist()
        squares, largest = float(sums["squares"]), float(sums["largest"])
        used = bins[1 : BINS + 1].nonzero().flatten()
        low, high = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 0)
        counts = array("q", bins[low + 1 : high + 1].tolist())
        if high == BINS and infinite:  # infinity is the upper edge of the last bin
            counts[-1] -= infinite
        return TensorCounts(
            elements=self.elements,
            zeros=int(bins[0]),
            lost=int(sums["lost"]) if "lost" in sums else None,
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
        self._add_to("bins", bins)
        self._add_to("special", special)
        self._add_to("squares", torch.dot(wide, wide))
        sums = self.sums
        sums["largest"] = torch.maximum(sums["largest"], largest) if "largest" in sums else largest

    def _add_to(self, name: str, count: Tensor) -> None:
        # Not in place: a sum of inference mode cannot be written outside of it.
        self.sums[name] = self.sums[name] + count if name in self.sums else count


def countable(tensor: Tensor) -> Tensor | None:
    """Return a tensor's values as `memory_of` does; None for a tensor that is not examined.

    Integers, tensors without data, nested tensors, and subclasses other than `DTensor` are not examined.
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


def comparable(memory: Tensor) -> Tensor:
    """Return values whose extremes can be computed: those of 8-bit dtypes in float32."""
    return memory.float() if memory.dtype in _EIGHT_BIT else memory


def _in_float32(piece: Tensor) -> Tensor:
    if piece.dtype is not torch.float64:
        return piece.float()
    clamped = piece.abs().clamp_(FORMATS["float32"].smallest_subnormal, FORMATS["float32"].largest)
    return torch.where(piece.isfinite() & (piece != 0), clamped, piece).float()


def _special(magnitude: Tensor, bits: Tensor, bins: Tensor, dtype: torch.dtype) -> Tensor:
    smallest, largest = _LIMITS[dtype]
    low, high = _KEYS_OF_LIMITS[dtype]
    counts = [bins.new_zeros(())] * 3
    if _may_have(bins, 1, low + 1):
        counts[0] = torch.count_nonzero((magnitude < smallest) & (bits != 0))
    if _may_have(bins, BINS, BINS + 1):
        counts[1] = torch.count_nonzero(bits == _INFINITY)
    if _may_have(bins, high, high + 1):
        counts[2] = torch.count_nonzero(magnitude == largest)
    return torch.stack(counts)


def _may_have(bins: Tensor, begin: int, end: int) -> bool:
    """Return True if a range of bins may have counts: only on the CPU this can be read without waiting."""
    return bins.device.type != "cpu" or bool(bins[begin:end].any())


def _counted(keys: Tensor) -> Tensor:
    if keys.device.type == "cpu" or torch.are_deterministic_algorithms_enabled():
        return torch.bincount(keys, minlength=_KEYS)
    return _counted_without_waiting(keys)


def _counted_without_waiting(keys: Tensor) -> Tensor:
    """Return the same as `bincount`, which waits for the largest key off the CPU; up to 2**24 keys."""
    # A key in the middle of its bin is counted there with any rounding.
    return torch.histc(keys.float().add_(0.5), bins=_KEYS, min=0, max=_KEYS).long()
