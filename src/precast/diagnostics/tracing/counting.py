"""Counting mode: how often each rule is carried out and how many casts that makes, at the cost of a few Python calls.

Invariants: nothing below the autocast keys is seen, so casts that the program asks for and those of backward are not
counted. What is counted here is what the full trace counts for the same rules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from precast import _torch
from precast.diagnostics.failures import Failures
from precast.diagnostics.schema import Count
from precast.diagnostics.tracing import reasons
from precast.diagnostics.tracing.call_sites import outermost_regions
from precast.engine.operation import Operation
from precast.engine.thread_state import regions
from precast.policy.policy import Policy, Rule

__all__ = ["Counter", "Counts"]

_F32: Final = torch.float32
_F64: Final = torch.float64
_Casts = Callable[[Operation, tuple[Any, ...]], int]
_Known = tuple[Policy, Count | None, _Casts | None]


class Counts(dict[tuple[str, str, str], Count]):
    """Calls and casts by operation, device type and rule; a missing key starts at zero."""

    def __missing__(self, key: tuple[str, str, str]) -> Count:
        count = self[key] = Count(*key)
        return count


class Counter:
    """Is told of decisions as a `Recorder` is, and counts."""

    def __init__(self, counts: Counts, failures: Failures) -> None:
        self.counts = counts
        self.failures = failures
        self._known: dict[tuple[int, str, str], _Known] = {}
        self._copies: set[tuple[int, torch.dtype]] = set()
        """The weights that PyTorch's own cache holds until the outermost region ends, and their dtypes there."""
        self._copies_since = -1

    def begin(self, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A rule is about to be carried out."""
        policy = reasons.policy_here(op.device_type)
        key = id(policy), op.name, op.device_type
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._look(policy, op)
        _, count, casts = known
        if count is None:
            return
        count.calls += 1
        if casts is not None:
            count.casts += casts(op, (*args, *kwargs.values()) if kwargs else args)

    def end(self, _result: Any) -> None:
        """It has been carried out."""

    def fail(self, _error: BaseException) -> None:
        """It has raised."""

    def _look(self, policy: Policy, op: Operation) -> _Known:
        device, found = op.device_type, reasons.decided(policy, op.name, op.device_type)
        if found.rule is None:  # it has a kernel for the sake of another policy
            return policy, None, None
        count, rule = self.counts[found.op, device, found.rule], Rule(found.rule)
        is_pytorchs = op.name in reasons.rows_of(reasons.torchs_policy(), device)
        if rule is Rule.PROMOTE and policy.mixed == "promote" and not is_pytorchs:
            return policy, count, None  # it casts only where the operation raises
        casts = {Rule.LOWER: self._lowered, Rule.FP32: _raised, Rule.PROMOTE: _promoted}
        return policy, count, casts.get(rule)

    def _lowered(self, op: Operation, args: tuple[Any, ...]) -> int:
        """How many arguments the rule `lower` casts, without those of which there is a copy."""
        lower = op.lower_dtype()
        return sum(
            tensor.dtype is not lower
            and not (
                tensor.dtype is _F32 and _is_leaf(tensor) and self._has_copy(op, tensor, lower)
            )
            for tensor in _eligible(op, args)
        )

    def _has_copy(self, op: Operation, leaf: Tensor, dtype: torch.dtype) -> bool:
        if not torch.is_autocast_cache_enabled():
            return False
        if reasons.has_policy_of_precast(op.device_type):
            return regions.cache.has(leaf, dtype)
        if not leaf.requires_grad or torch.is_inference_mode_enabled():
            return False  # PyTorch's cache takes neither
        if self._copies_since != outermost_regions():
            self._copies_since = outermost_regions()
            self._copies.clear()
        key = id(leaf), dtype
        is_held = key in self._copies
        self._copies.add(key)
        return is_held


def _is_leaf(tensor: Tensor) -> bool:
    """Asked of no view: of one whose base was written, PyTorch raises."""
    return not _torch.is_view(tensor) and tensor.is_leaf


def _raised(op: Operation, args: tuple[Any, ...]) -> int:
    return sum(tensor.dtype is not _F32 for tensor in _eligible(op, args))


def _promoted(op: Operation, args: tuple[Any, ...]) -> int:
    tensors = _eligible(op, args)
    wide = sum(tensor.dtype is _F32 for tensor in tensors)
    return len(tensors) - wide if wide else 0


def _eligible(op: Operation, args: tuple[Any, ...]) -> list[Tensor]:
    is_on = _torch.is_on(op.device_type)
    found: list[Tensor] = []
    for value in args:
        if isinstance(value, Tensor):
            if value.dtype.is_floating_point and value.dtype is not _F64 and is_on(value):
                found.append(value)
        elif isinstance(value, list | tuple):
            found += _eligible(op, tuple(value))
    return found
