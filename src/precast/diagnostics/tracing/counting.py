"""Counting mode: counts the calls under each rule and their casts, with a few Python calls per operation.

Invariants: only operations that reach the autocast dispatch keys are counted, not the program's explicit casts or casts
in backward. The counts equal those of the full trace for the same rules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from precast import _torch
from precast.diagnostics.failures import Failures
from precast.diagnostics.tracing import reasons
from precast.diagnostics.tracing.call_sites import outermost_regions
from precast.diagnostics.tracing.listening import OperationListener
from precast.engine.operation import Operation
from precast.engine.product_kernels import ADDED
from precast.engine.thread_state import regions
from precast.policy.policy import Policy, Rule
from precast.report.schema import RuleCount

__all__ = ["RuleCounter", "RuleCounts"]

_F32: Final = torch.float32
_F64: Final = torch.float64
_Casts = Callable[[Operation, tuple[Any, ...]], int]
_Entry = tuple[Policy, RuleCount | None, _Casts | None]


class RuleCounts(dict[tuple[str, str, str], RuleCount]):
    """Calls and casts by operation, device type and rule; a missing key starts at zero."""

    def __missing__(self, key: tuple[str, str, str]) -> RuleCount:
        count = self[key] = RuleCount(*key)
        return count


class RuleCounter(OperationListener):
    """Counts the applications of each rule, and their casts."""

    def __init__(self, counts: RuleCounts, failures: Failures) -> None:
        self.counts = counts
        self.failures = failures
        self._entries: dict[tuple[int, str, str], _Entry] = {}
        self._copies: set[tuple[int, torch.dtype]] = set()
        """The entries of PyTorch's weight cache in the current outermost region: id of the weight, and dtype."""
        self._copies_region = -1

    def begin(self, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count an operation."""
        policy = reasons.policy_here(op.device_type)
        key = id(policy), op.name, op.device_type
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = self._entry(policy, op)
        _, count, casts = entry
        if count is None:
            return
        count.calls += 1
        if casts is not None:
            count.casts += casts(op, (*args, *kwargs.values()) if kwargs else args)

    def _entry(self, policy: Policy, op: Operation) -> _Entry:
        device, decision = op.device_type, reasons.decide(policy, op.name, op.device_type)
        if decision.rule is None:  # only another policy has a rule for it
            return policy, None, None
        count, rule = self.counts[decision.op, device, decision.rule], Rule(decision.rule)
        matches_torch = op.name in reasons.rows_of(reasons.torchs_policy(), device)
        if rule is Rule.PROMOTE and policy.mixed == "promote" and not matches_torch:
            return policy, count, None  # it casts only where the operation raises
        casts = {
            Rule.LOWER: self._count_lower_casts,
            Rule.LOWER_OUT_FP32: self._count_factor_casts,
            Rule.FP32: _count_fp32_casts,
            Rule.PROMOTE: _count_promote_casts,
        }
        return policy, count, casts.get(rule)

    def _count_lower_casts(self, op: Operation, args: tuple[Any, ...]) -> int:
        lower = op.lower_dtype()
        return sum(
            tensor.dtype is not lower
            and not (
                tensor.dtype is _F32 and _is_leaf(tensor) and self._has_copy(op, tensor, lower)
            )
            for tensor in _eligible(op, args)
        )

    def _count_factor_casts(self, op: Operation, args: tuple[Any, ...]) -> int:
        """Return the number of factors that are rounded. What the product is added to stays in float32."""
        return self._count_lower_casts(op, args[1:3] if op.name in ADDED else args[:2])

    def _has_copy(self, op: Operation, leaf: Tensor, dtype: torch.dtype) -> bool:
        if not torch.is_autocast_cache_enabled():
            return False
        if reasons.has_policy_of_precast(op.device_type):
            return regions.cache.has(leaf, dtype)
        if not leaf.requires_grad or torch.is_inference_mode_enabled():
            return False  # PyTorch caches neither
        if self._copies_region != outermost_regions():
            self._copies_region = outermost_regions()
            self._copies.clear()
        key = id(leaf), dtype
        is_held = key in self._copies
        self._copies.add(key)
        return is_held


def _is_leaf(tensor: Tensor) -> bool:
    """Return True for a leaf that is not a view: `is_leaf` raises for a view whose base was written."""
    return not _torch.is_view(tensor) and tensor.is_leaf


def _count_fp32_casts(op: Operation, args: tuple[Any, ...]) -> int:
    return sum(tensor.dtype is not _F32 for tensor in _eligible(op, args))


def _count_promote_casts(op: Operation, args: tuple[Any, ...]) -> int:
    tensors = _eligible(op, args)
    wide = sum(tensor.dtype is _F32 for tensor in tensors)
    return len(tensors) - wide if wide else 0


def _eligible(op: Operation, args: tuple[Any, ...]) -> list[Tensor]:
    is_on = _torch.is_on(op.device_type)
    tensors: list[Tensor] = []
    for value in args:
        if isinstance(value, Tensor):
            if value.dtype.is_floating_point and value.dtype is not _F64 and is_on(value):
                tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += _eligible(op, tuple(value))
    return tensors
