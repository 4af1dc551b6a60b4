"""Finds out by calling an operation what 16-bit arguments do to it: whether it takes them, and what its result follows.

Invariants:

- a call is made outside of all regions, on random tensors of the recorded shapes, strides and ranges;
- what an operation does with float32 beside 16-bit arguments is what it did, not what its schema or name says.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from precast import _torch
from precast._internal.display import dtype_name
from precast.tuning.calls import arguments_of, is_castable, made, tensors_in_order
from precast.tuning.sites import Argument, Call

__all__ = ["Probed", "first_floating", "probe"]

_F32: Final = torch.float32
_LONGEST: Final = 120


@dataclass(frozen=True)
class Probed:
    """What 16-bit arguments do to one kind of call.

    Attributes:
        barred: why it cannot run in 16 bits; "" if it can.
        writes: whether it writes to tensors that it was given, beside those that it returns.
        decides: for each tensor of the call, whether the dtype of the result follows it.
    """

    barred: str
    writes: bool
    decides: tuple[bool, ...]


def probe(call: Call, given: Collection[int], low: torch.dtype, device: str = "cpu") -> Probed:
    """Calls an operation in 16 bits, and in mixtures with float32.

    Args:
        call: what to call.
        given: the positions, among its tensors, of those that no operation made, such as weights; they stay float32.
        low: the 16-bit dtype.
        device: where.
    """
    tensors = arguments_of(call)
    floating = [i for i, tensor in enumerate(tensors) if is_castable(tensor.dtype)]
    runs = _Runs(call, low, device)
    error, result, writes = runs.under(frozenset(floating))
    if error:
        works, _, writes = runs.under(frozenset())
        why = "" if works else f"raises in {dtype_name(low)}: {error}"
        # Where random numbers are refused in float32 too, nothing is known of it.
        return Probed(why, writes, tuple(i in floating for i in range(len(tensors))))
    if result is not low:
        why = f"gives {dtype_name(result)} whatever it is given"
        return Probed(why, writes, tuple(i in floating for i in range(len(tensors))))
    held = _held_back(runs, floating, [i for i in floating if i in given], tensors)
    return Probed("", writes, tuple(i in floating and i not in held for i in range(len(tensors))))


def first_floating(result: Any) -> Tensor | None:
    """The first tensor of a result that rules could have cast."""
    found = tensors_in_order((result,), {})
    return next((tensor for tensor in found if is_castable(tensor.dtype)), None)


def _held_back(
    runs: _Runs, floating: list[int], given: list[int], tensors: list[Argument]
) -> frozenset[int]:
    """The tensors that may be float32 beside 16-bit ones without making the result float32."""
    numbers = [i for i in floating if not tensors[i].shape]
    for held in (frozenset({*given, *numbers}), frozenset(given), frozenset(numbers)):
        if held and held != frozenset(floating):
            error, result, _ = runs.under(frozenset(floating) - held)
            if not error and result is runs.low:
                return held
    return frozenset()


class _Runs:
    """Runs of one call with some of its tensors in 16 bits."""

    def __init__(self, call: Call, low: torch.dtype, device: str) -> None:
        self.call = call
        self.low = low
        self._device = device
        self._function = _torch.find_overload(call.overload)
        assert self._function is not None, f"{call.overload} has just been called"

    def under(self, lowered: frozenset[int]) -> tuple[str, torch.dtype | None, bool]:
        """The error or "", the dtype of the result, and whether it wrote to what it was given."""
        generator = torch.Generator(self._device).manual_seed(0)
        args, kwargs = made(
            self.call, lambda i, a: self.low if i in lowered else a.dtype, generator
        )
        tensors = tensors_in_order(args, kwargs)
        before = [tensor.detach().clone() for tensor in tensors]
        assert self._function is not None
        try:
            with torch.no_grad(), torch.random.fork_rng([]):
                result = self._function(*args, **kwargs)
        except Exception as error:  # an operation may raise anything
            return str(error).partition("\n")[0][:_LONGEST] or type(error).__name__, None, False
        first = first_floating(result)
        returned = {id(tensor) for tensor in tensors_in_order((result,), {})}
        writes = any(
            id(tensor) not in returned and not _equal(tensor, old)
            for tensor, old in zip(tensors, before, strict=True)
        )
        return "", None if first is None else first.dtype, writes


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same numbers; NaN is equal to itself here."""
    return torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))
