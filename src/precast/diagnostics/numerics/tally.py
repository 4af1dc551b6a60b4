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
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from precast import _torch
from precast.diagnostics.numerics.bins import BINS, SHIFT, Magnitudes, exponents
from precast.diagnostics.numerics.formats import FORMATS
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

_LIMITS: Final = {
    **{getattr(torch, name): (f.smallest_normal, f.largest) for name, f in FORMATS.items()},
    torch.float64: (0.0, math.nan),  # its own do not exist in float32, so no value equals them
}
"""The smallest normal value and the largest, by dtype."""


class TensorCounts(NamedTuple):
    """The counts of one tensor in one step, or of several together."""

    figures: dict[str, Any]
    """The tensor's columns in `Monitor.to_dict`; "exponents" maps binary exponents to numbers of values."""
    magnitudes: Magnitudes


class TensorTally:
    """The sums over one tensor, or several."""

    __slots__ = ("elements", "scaled", "sums")

    def __init__(self, *, scaled: bool = False) -> None:
        self.elements = 0
        self.scaled = scaled
        """True if the values still contain the loss scale."""
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
        bins, special = torch.zeros(_KEYS, dtype=torch.int64), torch.zeros(3)
        zero = {"squares": 0.0, "largest": 0.0, "bins": bins, "special": special}
        sums: dict[str, Any] = {**zero, **self.sums}
        bins = sums["bins"].cpu()
        subnormal, infinite, saturated = map(int, sums["special"].tolist())
        nan = int(bins[BINS + 1 :].sum())
        used = bins[1 : BINS + 1].nonzero().flatten()
        low, high = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 0)
        counts = array("q", bins[low + 1 : high + 1].tolist())
        if high == BINS and infinite:  # infinity is the upper edge of the last bin
            counts[-1] -= infinite
        magnitudes = Magnitudes(low, counts, float(sums["largest"]), power)
        finite = self.elements - infinite - nan
        squares = math.ldexp(float(sums["squares"]), 2 * power)
        figures = {
            "exponents": exponents(magnitudes),
            "elements": self.elements,
            "zeros": int(bins[0]),
            "underflow_zeros": int(sums.get("lost", 0)),
            "underflow_known": "lost" in sums,
            "subnormal": subnormal,
            "overflow": infinite,
            "saturated": saturated,
            "nan": nan,
            "maximum": magnitudes.maximum if finite else None,
            "rms": math.sqrt(squares / finite) if finite else None,
        }
        return TensorCounts(figures, magnitudes)

    def _add(self, piece: Tensor, dtype: torch.dtype) -> None:
        magnitude = piece.abs()
        bits = magnitude.view(torch.int32)
        # One less, so that an edge belongs to the bin below it; the shift of zero's -1 is -1.
        bins = _counted((bits - 1).bitwise_right_shift_(SHIFT).add_(1))
        if _may_have_limits(bins, *_LIMITS[dtype]):
            self._add_to("special", _special(magnitude, bits, *_LIMITS[dtype]))
            magnitude.nan_to_num_(0.0, 0.0, 0.0)
        largest = magnitude.amax()
        wide = magnitude.to(torch.float32 if piece.device.type == "mps" else torch.float64)
        self._add_to("bins", bins)
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
    kind = type(tensor)
    if kind is Tensor and tensor.dtype in _USUAL and tensor.layout is torch.strided:
        return None if tensor.is_meta or tensor.is_nested else tensor
    if kind is not Tensor and kind is not torch.nn.Parameter and not _torch.is_dtensor(tensor):
        return None
    if tensor.layout not in _LAYOUTS or tensor.is_nested:
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


def _may_have_limits(bins: Tensor, smallest: float, largest: float) -> bool:
    """Return True if `_special` may count values: only on the CPU this can be read without waiting."""
    low, high = _key(smallest), min(_key(largest), BINS)
    return not bins.is_cpu or bool(bins[1 : low + 1].any()) or bool(bins[high:].any())


def _key(value: float) -> int:
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return ((bits - 1) >> SHIFT) + 1


def _special(magnitude: Tensor, bits: Tensor, smallest: float, largest: float) -> Tensor:
    """Return the numbers of values that are subnormal, infinite, and equal to the largest."""
    special = (magnitude < smallest) & (bits != 0), bits == _INFINITY, magnitude == largest
    return torch.stack([torch.count_nonzero(each) for each in special])


def _counted(keys: Tensor) -> Tensor:
    if keys.is_cpu or torch.are_deterministic_algorithms_enabled():
        return torch.bincount(keys, minlength=_KEYS)
    return _counted_without_waiting(keys)


def _counted_without_waiting(keys: Tensor) -> Tensor:
    """Return the same as `bincount`, which waits for the largest key off the CPU; up to 2**24 keys."""
    # A key in the middle of its bin is counted there with any rounding.
    return torch.histc(keys.float().add_(0.5), bins=_KEYS, min=0, max=_KEYS).long()
