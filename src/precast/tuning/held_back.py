"""Chooses by errors alone: the base policy, with those operations in float32 that lose too much in 16 bits.

Invariants:
- an operation that is barred is always held back;
- of the others, those with the largest errors are, until the sum of the errors of the rest is what is allowed;
- a rule is written only for a module whose operation is held back, and for those in it that would inherit the rule;
- modules with the same rules, whose names differ in one component, share a pattern.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

import torch

from precast._internal.display import dtype_name
from precast.policy.policy import Policy, Rule
from precast.tuning.fewest_rows import Row
from precast.tuning.policy_text import with_patterns
from precast.tuning.sensitivity import Sensitivity, SiteErrors
from precast.tuning.sites import Program, Site

__all__ = ["held_back", "policy_holding", "reason_of", "words_of"]

_FP32: Final = (Rule.FP32, Rule.FP32_SET_DTYPE, Rule.FP32_APPEND_DTYPE)


def held_back(found: Sensitivity, *, loss: float, gradient: float) -> list[Site]:
    """The sites that have to run in float32, so that relative errors are at most so large; the worst first."""

    def weight(site: Site) -> float:
        errors = found.sites[site]
        return max(errors.loss / loss**2, errors.gradient / gradient**2)

    ordered = sorted(found.sites, key=weight, reverse=True)
    kept = {site for site in ordered if not found.sites[site].barred}
    chosen = [site for site in ordered if site not in kept]
    for site in ordered:
        if site not in kept:
            continue
        total = _sum(found, kept)
        if total[0] <= loss**2 and total[1] <= gradient**2:
            break
        kept.remove(site)
        chosen.append(site)
    return chosen


def policy_holding(
    sites: Collection[Site], found: Sensitivity, program: Program, base: Policy, name: str
) -> Policy:
    """The base policy with these sites in float32, and a reason for each.

    Args:
        sites: those that are held back.
        found: their errors.
        program: of which they are.
        base: the rules for all others.
        name: of the policy.
    """
    held = {site for site in sites if site.rule not in _FP32}
    rows: dict[str, dict[str, Row]] = {}
    outside: dict[str, Any] = {}
    for site in (site for site in program.sites if site in held):
        if site.module is None:
            reason = reason_of(found.sites[site], program.low)
            outside[site.op] = {"rule": "fp32", "reason": reason}
        else:
            rows.setdefault(site.module, {})[site.op] = _row(site, Rule.FP32)
    for site in sorted(program.sites, key=lambda site: (site.module or "").count(".")):
        around = _nearest(site, rows)
        if around is None or site in held or rows[around][site.op].rule is not Rule.FP32:
            continue
        rows.setdefault(str(site.module), {})[site.op] = _row(site, site.rule or Rule.KEEP)
    modules: dict[str, dict[str, Any]] = {}
    for row in with_patterns(
        [row for ops in rows.values() for row in ops.values()], program.modules
    ):
        reason = "; ".join(_reasons(row, found, program.low))
        modules.setdefault(str(row.place), {})[row.op] = {"rule": str(row.rule), "reason": reason}
    return base.replace(
        name=name,
        ops={program.device: outside},
        modules={module: {"ops": ops} for module, ops in modules.items()},
    )


def _row(site: Site, rule: Rule) -> Row:
    return Row(str(site.module), site.op, rule, (site,))


def _reasons(row: Row, found: Sensitivity, low: torch.dtype) -> Iterator[str]:
    """Why a row is there: the reason of the worst of its sites, and how many they are."""
    if row.rule is not Rule.FP32:
        yield "loses little here"
        return
    worst = max(
        (found.sites[site] for site in row.sites), key=lambda e: (bool(e.barred), e.gradient)
    )
    yield reason_of(worst, low)
    if len(row.sites) > 1:
        yield f"the worst of {len(row.sites)} places"


def reason_of(errors: SiteErrors, low: torch.dtype) -> str:
    """Why a site with these errors is held back, in one line with figures."""
    dtype = dtype_name(low)
    return f"{dtype}: {errors.barred}" if errors.barred else f"{dtype} {words_of(errors)}"


def words_of(errors: SiteErrors) -> str:
    """What 16 bits do to a site with these errors, with figures."""
    if errors.barred:
        return f"is ruled out: {errors.barred}"
    alone = errors.measured
    if errors.is_inference:
        return f"changes outputs by {_percent(errors.gradient)}, and the metric by {_percent(errors.loss)}"
    if alone is not None and alone.flushed > 0.1:
        return f"makes {alone.flushed:.0%} of the gradient of {alone.parameter} zero"
    gradient = f"the gradient of {alone.parameter}" if alone is not None else "gradients"
    return f"changes {gradient} by {_percent(errors.gradient)}, and the loss by {_percent(errors.loss)}"


def _percent(square: float) -> str:
    """The root of a number as a share."""
    share = math.sqrt(square)
    return f"{share:.0%}" if share >= 0.1 else f"{100 * share:.2g}%"


def _nearest(site: Site, rows: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The nearest module, among those that have a row for the site's operation, that the site is in."""
    if site.module is None:
        return None
    name = site.module
    while True:
        if site.op in rows.get(name, {}):
            return name
        if not name:
            return None
        name = name.rpartition(".")[0]


def _sum(found: Sensitivity, sites: Collection[Site]) -> tuple[float, float]:
    each = [found.sites[site] for site in sites]
    return math.fsum(one.loss for one in each), math.fsum(one.gradient for one in each)
