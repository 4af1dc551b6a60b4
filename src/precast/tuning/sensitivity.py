"""Measurement of the error that each operation adds to the loss and to the gradients when it runs in 16 bits.

A group of operations runs in 16 bits and all others in float32. A group is halved only while its error is larger than
its share of the allowed error, the group with most to gain first. Operations of one kind (the same operation on the
same shapes) are separated last, so that the error of a group that is not halved any more is shared among similar
operations.

Invariants:
- at most `MOST_RUNS` groups are measured, so the time grows with the model as the time of a step does;
- errors are squares of relative errors, because those of independent roundings add up;
- an operation that overflows under every loss scale is excluded from 16 bits.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import torch

from precast.policy.policy import Policy
from precast.tuning.calls import tensor_arguments
from precast.tuning.policy_rows import explicit_policy
from precast.tuning.setups import Setup
from precast.tuning.sites import OperationSite, TunedProgram

__all__ = ["MOST_RUNS", "ErrorMeter", "GroupErrors", "Sensitivity", "SiteErrors"]
__all__ += ["measure_sensitivity"]

MOST_RUNS: Final = 64
"""The most groups that are measured. To find one operation among 3,000 takes about 24."""
_MOST_EXCESS: Final = 16.0
"""The most times its share that the error of a group counts when groups are ordered; an overflow is infinite."""


@dataclass(frozen=True)
class GroupErrors:
    """The errors of a group of operations in 16 bits, as squares of relative errors; infinite where it overflows.

    Attributes:
        loss: the error of the loss, or of the metric.
        gradient: the error of the gradient that changes most, or of the output.
        parameter: the parameter of that gradient.
        flushed: the share of that gradient that becomes zero and is not zero in float32.
        silent: a parameter whose gradient becomes zero, so that it is not trained; empty if there is none.
        failure: why there is nothing to compare.
    """

    loss: float
    gradient: float
    parameter: str = ""
    flushed: float = 0.0
    silent: str = ""
    failure: str = ""

    @classmethod
    def infinite(cls, failure: str) -> GroupErrors:
        """Return the errors of a setup that cannot be compared."""
        return cls(math.inf, math.inf, failure=failure)

    def fits(self, loss: float, gradient: float) -> bool:
        """Return True if both errors are at most as large as these."""
        return self.loss <= loss and self.gradient <= gradient


@dataclass(frozen=True)
class SiteErrors:
    """The errors of one operation.

    Attributes:
        loss: the square of the relative error of the loss.
        gradient: that of the gradient that changes most.
        barred: why the operation must not run in 16 bits; empty if it may.
        measured: the errors measured for it alone; None if it has a share of those of a group.
    """

    loss: float
    gradient: float
    barred: str = ""
    measured: GroupErrors | None = None


@dataclass
class Sensitivity:
    """The errors of all operations of a program.

    Attributes:
        sites: the errors of each operation that may run in 16 bits.
        scale: the loss scale that a gradient scaler would reach; 1 for bfloat16.
        runs: the number of groups that were measured.
        shared: the number of operations in groups that were not halved although their error is too large, because the
            time or the runs were used up.
    """

    sites: dict[OperationSite, SiteErrors] = field(default_factory=dict)
    scale: float = 1.0
    runs: int = 0
    shared: int = 0


class ErrorMeter(Protocol):
    """Measures the errors of setups against float32."""

    scale: float
    """The loss scale."""

    def errors(self, setup: Setup) -> GroupErrors:
        """Return the errors under a setup; infinite where something overflows, or it cannot run."""

    def find_scale(self, setup: Setup) -> None:
        """Set the loss scale to the largest one under which no gradient overflows with this setup."""


def measure_sensitivity(
    meter: ErrorMeter,
    program: TunedProgram,
    base: Policy,
    *,
    loss: float,
    gradient: float,
    deadline: float = math.inf,
    progress: Callable[[int, int], None] | None = None,
) -> Sensitivity:
    """Measure the errors of operations, each alone where its error is more than its share of the allowed one.

    Args:
        meter: compares with float32.
        program: the operations.
        base: the policy for everything else.
        loss: the relative error of the loss that all operations together may add.
        gradient: that of the gradient of each parameter.
        deadline: on `time.monotonic`'s clock; groups that are not halved by then share their errors.
        progress: called before each run with the number of operations without a result, and that of runs.
    """
    result = Sensitivity()
    sites = [site for site in program.sites if not site.barred]
    for site in list(sites):
        if reason := _out_of_range(site, program.low):
            result.sites[site] = SiteErrors(math.inf, math.inf, reason)
            sites.remove(site)
    if not sites:
        return result
    halving = _Halving(meter, program, _with_rows_of(base, program), result, (loss**2, gradient**2))
    if program.low is torch.float16:
        meter.find_scale(halving.setup(sites))
        result.scale = meter.scale
    halving.run(sites, deadline, progress or (lambda _remaining, _runs: None))
    result.sites = {site: result.sites[site] for site in program.sites if site in result.sites}
    return result


class _Halving:
    """Measures groups of operations, and halves those whose error is more than their share, the worst first."""

    def __init__(
        self,
        meter: ErrorMeter,
        program: TunedProgram,
        base: Policy,
        result: Sensitivity,
        allowed: tuple[float, float],
    ) -> None:
        self._meter = meter
        self._program = program
        self._base = base
        self._result = result
        self._allowed = allowed
        """The errors of loss and gradients that all operations together may have."""
        self._queue: list[tuple[float, int, list[OperationSite], GroupErrors]] = []
        self._count = itertools.count()

    def setup(self, group: Sequence[OperationSite]) -> Setup:
        """Return the setup with a group of operations in 16 bits, and all others in float32."""
        choice = self._program.choose(group)
        policy = explicit_policy(choice, self._program, self._base)
        return Setup(f"{len(group)} operations", policy, self._program.low)

    def run(
        self, sites: list[OperationSite], deadline: float, progress: Callable[[int, int], None]
    ) -> None:
        """Measure groups until each operation has its errors."""
        result, remaining = self._result, len(sites)
        groups = [_ordered_by_kind(sites)]
        while groups:
            for group in groups:
                progress(remaining, result.runs)
                remaining -= self._measure(group, len(sites))
            if (
                not self._queue
                or result.runs + 2 > MOST_RUNS
                or (result.runs and time.monotonic() > deadline)
            ):
                break
            groups = _halves(heapq.heappop(self._queue)[2])
        for _, _, group, errors in self._queue:
            result.shared += len(group)
            self._share(group, errors, alone=False)

    def _measure(self, group: list[OperationSite], count: int) -> int:
        """Measure a group; return the number of operations that have their errors now."""
        errors = self._meter.errors(self.setup(group))
        self._result.runs += 1
        loss, gradient = (allowed * len(group) / count for allowed in self._allowed)
        excess = max(errors.loss / loss, errors.gradient / gradient)
        if len(group) > 1 and excess > 1:
            gain = len(group) * min(excess, _MOST_EXCESS)
            heapq.heappush(self._queue, (-gain, next(self._count), group, errors))
            return 0
        self._share(group, errors, alone=len(group) == 1)
        return len(group)

    def _share(self, group: Sequence[OperationSite], errors: GroupErrors, *, alone: bool) -> None:
        """Give each operation of a group its share of the errors."""
        reason = ""
        if not math.isfinite(errors.gradient):
            group_note = f"; measured as one of a group of {len(group)}"
            reason = f"{errors.failure}{'' if alone else group_note}"
        for site in group:
            self._result.sites[site] = SiteErrors(
                errors.loss / len(group),
                errors.gradient / len(group),
                reason,
                errors if alone else None,
            )


def _kind(site: OperationSite) -> object:
    """Return what similar operations share: the operation, and the shapes of its first call."""
    shapes = [argument.shape for call in site.calls[:1] for argument in tensor_arguments(call)]
    return site.op, tuple(shapes)


def _ordered_by_kind(sites: Sequence[OperationSite]) -> list[OperationSite]:
    kinds: dict[object, list[OperationSite]] = {}
    for site in sites:
        kinds.setdefault(_kind(site), []).append(site)
    return [site for group in kinds.values() for site in group]


def _halves(group: list[OperationSite]) -> list[list[OperationSite]]:
    """Divide a group into two of about the same size, between two kinds if there are several."""
    kinds = [_kind(site) for site in group]
    borders = [at for at in range(1, len(group)) if kinds[at] != kinds[at - 1]]
    middle = len(group) // 2
    at = min(borders, key=lambda border: abs(border - middle), default=middle)
    return [group[:at], group[at:]]


def _with_rows_of(base: Policy, program: TunedProgram) -> Policy:
    """Return the policy with only the rows of the program's operations, which makes group policies ten times faster."""
    operations = {f"aten::{site.op}" if "::" not in site.op else site.op for site in program.sites}
    table = base.entries(program.device)
    rows = {key: entry for key, entry in table.items() if key.partition(".")[0] in operations}
    return Policy(base.name, {program.device: rows}, base.mixed)


def _out_of_range(site: OperationSite, dtype: torch.dtype) -> str:
    """Return why the inputs of an operation do not fit into float16; "" if they do.

    Numbers beyond the range of bfloat16 stand for infinity, as in attention masks.
    """
    if dtype is not torch.float16:
        return ""
    arguments = [argument for call in site.calls for argument in tensor_arguments(call)]
    largest = max((max(-each.low, each.high) for each in arguments), default=0.0)
    if largest <= torch.finfo(dtype).max:
        return ""
    return f"it takes numbers up to {largest:.3g}, and float16 ends at {torch.finfo(dtype).max:g}"
