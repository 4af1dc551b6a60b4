"""Effect of 16-bit arguments on an operation, found by calling it outside of all regions on random tensors."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from precast import _torch
from precast._internal.display import dtype_name
from precast.tuning.calls import (
    first_floating,
    is_castable,
    make_arguments,
    tensor_arguments,
    tensors_in_order,
)
from precast.tuning.sites import CallRecord, TensorArgument

__all__ = ["ProbeResult", "probe"]

_LONGEST: Final = 120


@dataclass(frozen=True)
class ProbeResult:
    """The effect of 16-bit arguments on one kind of call.

    Attributes:
        barred: why it cannot run in 16 bits; "" if it can.
        writes: True if it writes to arguments that it does not return.
        decides: for each tensor of the call, True if the dtype of the result follows it.
    """

    barred: str
    writes: bool
    decides: tuple[bool, ...]


def probe(
    call: CallRecord, outside: Collection[int], low: torch.dtype, device: str = "cpu"
) -> ProbeResult:
    """Call an operation in 16 bits, and in mixtures with float32.

    Args:
        call: the recorded call.
        outside: the positions, among its tensors, of those that no operation made, such as weights; they may stay
            float32.
        low: the 16-bit dtype.
        device: the device type.
    """
    tensors = tensor_arguments(call)
    floating = [i for i, tensor in enumerate(tensors) if is_castable(tensor.dtype)]
    probes = _Probes(call, low, device)
    error, dtype, writes = probes.run(frozenset(floating))
    barred, free = "", frozenset[int]()
    if error:
        float32_error, _, writes = probes.run(frozenset())
        # A call that refuses random numbers in float32 too is not excluded.
        barred = "" if float32_error else f"raises in {dtype_name(low)}: {error}"
    elif dtype is not low:
        barred = f"gives {dtype_name(dtype)} for inputs of any dtype"
    else:
        free = _free_tensors(probes, floating, [i for i in floating if i in outside], tensors)
    decides = tuple(i in floating and i not in free for i in range(len(tensors)))
    return ProbeResult(barred, writes, decides)


def _free_tensors(
    probes: _Probes, floating: list[int], outside: list[int], tensors: list[TensorArgument]
) -> frozenset[int]:
    """Return the tensors that may be float32 beside 16-bit ones without making the result float32."""
    scalars = [i for i in floating if not tensors[i].shape]
    for free in (frozenset({*outside, *scalars}), frozenset(outside), frozenset(scalars)):
        if free and free != frozenset(floating):
            error, dtype, _ = probes.run(frozenset(floating) - free)
            if not error and dtype is probes.low:
                return free
    return frozenset()


class _Probes:
    """Runs of one call with some of its tensors in 16 bits."""

    def __init__(self, call: CallRecord, low: torch.dtype, device: str) -> None:
        self.low = low
        self._call = call
        self._device = device
        self._function = _torch.find_overload(call.overload)

    def run(self, lowered: frozenset[int]) -> tuple[str, torch.dtype | None, bool]:
        """Return the error or "", the dtype of the result, and True if it wrote to arguments it did not return."""
        assert self._function is not None, f"{self._call.overload} was recorded"
        generator = torch.Generator(self._device).manual_seed(0)
        args, kwargs = make_arguments(
            self._call, lambda i, a: self.low if i in lowered else a.dtype, generator
        )
        tensors = tensors_in_order(args, kwargs)
        before = [tensor.detach().clone() for tensor in tensors]
        try:
            with torch.no_grad(), torch.random.fork_rng([]):
                result = self._function(*args, **kwargs)
        except Exception as error:  # an operation may raise anything
            return str(error).partition("\n")[0][:_LONGEST] or type(error).__name__, None, False
        first = first_floating(result)
        returned = {id(tensor) for tensor in tensors_in_order((result,), {})}
        writes = any(
            id(tensor) not in returned and not _are_equal(tensor, old)
            for tensor, old in zip(tensors, before, strict=True)
        )
        return "", None if first is None else first.dtype, writes


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors have the same numbers; NaN equals itself here."""
    return torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))
