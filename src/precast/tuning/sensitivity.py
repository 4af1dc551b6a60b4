"""Measurement of the error that each operation adds to the loss and to the gradients when it runs in 16 bits.

A group of operations runs in 16 bits and all others in float32. A group is halved only while its error is larger than
its share of the allowed error, the group with most to gain first. Operations of one kind (the same operation on the
same shapes) are separated last, so that the error of a group that is not halved any more is shared among similar
operations.

Invariants:
- at most `MOST_RUNS` groups are measured, so the total time is proportional to the time of a step;
- errors are squares of relative errors, because those of independent roundings add up;
- an operation that overflows under every loss scale is excluded from 16 bits.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import torch

from precast.policy.policy import Policy
from precast.tuning.policy_rows import explicit_policy
from precast.tuning.setups import Setup
from precast.tuning.sites import OperationSite, TunedProgram
from precast.tuning.tasks import ErrorMeter, PrecisionErrors

__all__ = ["MOST_RUNS", "Sensitivity", "measure_sensitivity"]

MOST_RUNS: Final = 64
"""The most groups that are measured. To find one operation among 3,000 takes about 24."""
_MOST_EXCESS: Final = 16.0
"""Upper limit of a group's error relative to its share, for the order of groups: an overflow's error is infinite."""


@dataclass
class Sensitivity:
    """The errors of each operation that may run in 16 bits.

    Attributes:
        scale: the loss scale that a gradient scaler would reach; 1 for bfloat16.
        runs: the number of groups that were measured.
        shared: the number of operations in groups that there was no time to halve although their error is too large.
    """

    sites: dict[OperationSite, PrecisionErrors] = field(default_factory=dict)
    scale: float = 1.0
    runs: int = 0
    shared: int = 0


def measure_sensitivity(
    meter: ErrorMeter,
    program: TunedProgram,
    base: Policy,
    *,
    loss: float,
    gradient: float,
    deadline: float = math.inf,
    progress: Callable[[str], None] = lambda _: None,
) -> Sensitivity:
    """Measure the errors of operations, each alone where its error is more than its share of the allowed one.

    `loss` and `gradient` are the relative errors that all operations together may add. Groups that are not halved by
    the `deadline`, on `time.monotonic`'s clock, share their errors.
    """
    sites = [site for site in program.sites if not site.barred]
    excluded = {site: _out_of_range(site, program.low) for site in sites}
    result = Sensitivity(
        {site: PrecisionErrors(barred=reason) for site, reason in excluded.items() if reason}
    )
    sites = [site for site in sites if not excluded[site]]
    if not sites:
        return result
    base = _with_rows_of(base, program)

    def setup_of(group: Sequence[OperationSite]) -> Setup:
        """Return the setup with a group of operations in 16 bits, and all others in float32."""
        policy = explicit_policy(program.choose(group), program, base)
        return Setup(f"{len(group)} operations", policy, program.low)

    if program.low is torch.float16:
        meter.find_scale(setup_of(sites))
        result.scale = meter.scale
    queue: list[tuple[float, int, list[OperationSite], PrecisionErrors]] = []
    """Groups whose error is too large, with the one that gains most from a division first."""
    groups = [_ordered_by_kind(sites)]
    while groups:
        for group in groups:
            progress(f"{len(result.sites)} of {len(sites)} operations, {result.runs} runs")
            errors = meter.errors(setup_of(group))
            result.runs += 1
            excess = max(errors.loss / loss**2, errors.gradient / gradient**2)
            excess *= len(sites) / len(group)
            if len(group) > 1 and excess > 1:
                gain = len(group) * min(excess, _MOST_EXCESS)
                heapq.heappush(queue, (-gain, result.runs, group, errors))
            else:
                _share(result, group, errors)
        is_over = result.runs + 2 > MOST_RUNS or time.monotonic() > deadline
        groups = [] if is_over or not queue else _halves(heapq.heappop(queue)[2])
    for _, _, group, errors in queue:
        result.shared += len(group)
        _share(result, group, errors)
    result.sites = {site: result.sites[site] for site in program.sites if site in result.sites}
    return result


def _share(result: Sensitivity, group: Sequence[OperationSite], errors: PrecisionErrors) -> None:
    """Give each operation of a group its share of the errors."""
    count = len(group)
    each = replace(errors, loss=errors.loss / count, gradient=errors.gradient / count)
    if count == 1:
        each = replace(each, alone=True)
    else:
        note = errors.barred and f"{errors.barred}; measured as one of a group of {count}"
        each = replace(each, barred=note, parameter="", flushed=0.0, silent="")
    result.sites |= dict.fromkeys(group, each)


def _kind(site: OperationSite) -> object:
    """Return a key that similar operations share: the operation, and the shapes of its first call."""
    shapes = [argument.shape for call in site.calls[:1] for argument in call.tensors]
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
    table = base.rules(program.device)
    rows = {key: entry for key, entry in table.items() if key.partition(".")[0] in operations}
    return Policy(base.name, {program.device: rows}, base.mixed)


def _out_of_range(site: OperationSite, dtype: torch.dtype) -> str:
    """Return why the inputs of an operation do not fit into float16; "" if they do.

    Numbers beyond the range of bfloat16 stand for infinity, as in attention masks.
    """
    if dtype is not torch.float16:
        return ""
    arguments = [argument for call in site.calls for argument in call.tensors]
    largest = max((max(-each.low, each.high) for each in arguments), default=0.0)
    if largest <= torch.finfo(dtype).max:
        return ""
    return f"it takes numbers up to {largest:.3g}, and float16 ends at {torch.finfo(dtype).max:g}"
