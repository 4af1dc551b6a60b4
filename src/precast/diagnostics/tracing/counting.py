"""Counting mode: how often each rule is carried out and how many casts that makes, at the cost of some calls in Python.

Invariants: nothing below the autocast keys is seen: casts that the program asks for and those of backward are not
counted. What is counted here is what the full trace counts for the same rules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from precast import _torch
from precast.diagnostics.schema import Count
from precast.diagnostics.tracing.call_sites import outermost_regions
from precast.diagnostics.tracing.reasons import Reasons
from precast.engine.operation import Operation
from precast.engine.thread_state import regions
from precast.policy.policy import Policy, Rule

__all__ = ["Counter", "Counts"]

_F32: Final = torch.float32
_F64: Final = torch.float64


class Counts:
    """Calls and casts by operation, device type and rule."""

    def __init__(self) -> None:
        self.by_rule: dict[tuple[str, str, str], Count] = {}

    def of(self, op: str, device: str, rule: str) -> Count:
        """The counts of one rule."""
        key = op, device, rule
        known = self.by_rule.get(key)
        if known is None:
            known = self.by_rule[key] = Count(*key)
        return known

    def add(self, op: str, device: str, rule: str, casts: int) -> None:
        """One call more."""
        count = self.of(op, device, rule)
        count.calls += 1
        count.casts += casts


class Counter:
    """Is told of decisions as a `Recorder` is, and counts."""

    def __init__(self, counts: Counts) -> None:
        self.counts = counts
        self._reasons = Reasons()
        self._known: dict[tuple[int, str, str], _Known] = {}
        self._torchs_copies = _TorchsCopies()

    def begin(self, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A rule is about to be carried out."""
        policy = self._reasons.policy_here(op.device_type)
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
        decided = self._reasons.decided(policy, op)
        if decided.rule is None:  # it has a kernel for the sake of another policy
            return policy, None, None
        count = self.counts.of(decided.op, op.device_type, decided.rule)
        rules = {Rule.LOWER: self._lowered, Rule.FP32: _raised, Rule.PROMOTE: _promoted}
        rule = Rule(decided.rule)
        if (
            rule is Rule.PROMOTE
            and policy.mixed == "promote"
            and op.name not in _pytorchs(op.device_type)
        ):
            return policy, count, None  # it is asked for where the operation raises, and only there
        return policy, count, rules.get(rule)

    def _lowered(self, op: Operation, args: tuple[Any, ...]) -> int:
        """How many arguments the rule `lower` casts, but for those of which there is a copy."""
        lower, found = op.lower_dtype(), 0
        for tensor in _eligible(op, args):
            if tensor.dtype is not lower:
                found += not (
                    tensor.dtype is _F32 and tensor.is_leaf and self._has_copy(op, tensor, lower)
                )
        return found

    def _has_copy(self, op: Operation, leaf: Tensor, dtype: torch.dtype) -> bool:
        if not torch.is_autocast_cache_enabled():
            return False
        if self._reasons.is_pytorchs_own(op.device_type):
            return self._torchs_copies.has(leaf, dtype)
        return regions.cache.has(leaf, dtype)


_Casts = Callable[[Operation, tuple[Any, ...]], int]
_Known = tuple[Policy, Count | None, _Casts | None]


class _TorchsCopies:
    """Which weights PyTorch's own cache holds: leaves that require grad, until the outermost region ends."""

    def __init__(self) -> None:
        self._generation = -1
        self._held: set[tuple[int, torch.dtype]] = set()

    def has(self, leaf: Tensor, dtype: torch.dtype) -> bool:
        if not leaf.requires_grad or torch.is_inference_mode_enabled():
            return False
        if self._generation != outermost_regions():
            self._generation = outermost_regions()
            self._held.clear()
        key = id(leaf), dtype
        if key in self._held:
            return True
        self._held.add(key)
        return False


@functools.cache
def _pytorchs(device_type: str) -> frozenset[str]:
    return frozenset(Policy.load("torch").expand(device_type)[0])


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
