"""Findings grouped by their remedy, with the sum of their costs.

Invariants: wrong values come first, each as its own group; then the most expensive. Costs are those of the traced
operations.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeVar

from precast.report.schema import Finding, FindingCost, RunDocument
from precast.report.words import share, size

__all__ = ["Remedy", "all_findings", "cost_words", "is_numeric", "remedies", "time_words"]
__all__ += ["sum_costs"]

_NUMERIC = (
    *("overflow", "underflow", "nonfinite", "nan", "inf", "saturation"),
    *("rounded", "state rounded away", "average rounded away"),
)
_Number = TypeVar("_Number", int, float)
_MIN_SHARE = 0.01  # of the traced time: cheaper findings get no card and no sentence


class Remedy(NamedTuple):
    """One or several findings with the same remedy."""

    findings: list[Finding]
    cost: FindingCost
    """The sum of their costs."""

    @property
    def worst(self) -> Finding:
        """The most expensive of them."""
        return self.findings[0]

    @property
    def is_telling(self) -> bool:
        """True if values are wrong, or the cost is not small, or unknown."""
        part = self.cost.share if self.cost.low is None else self.cost.low
        return is_numeric(self.worst) or part is None or part >= _MIN_SHARE


def all_findings(document: RunDocument) -> list[Finding]:
    """Return the document's findings and the trace's, each once; wrong values first, then errors, then by cost."""
    every = [*document.findings, *(document.trace.findings if document.trace else [])]
    once = [each for i, each in enumerate(every) if each not in every[:i]]
    return sorted(once, key=lambda each: _weight(each, each.cost), reverse=True)


def remedies(document: RunDocument) -> list[Remedy]:
    """Return all findings, grouped by remedy; wrong values first, then the most expensive."""
    groups: dict[object, list[Finding]] = {}
    for number, each in enumerate(all_findings(document)):
        is_alone = is_numeric(each) or not each.suggestion
        key = number if is_alone else (each.suggestion, each.policy)
        groups.setdefault(key, []).append(each)
    grouped = [Remedy(group, sum_costs(each.cost for each in group)) for group in groups.values()]
    return sorted(grouped, key=lambda each: _weight(each.worst, each.cost), reverse=True)


def is_numeric(finding: Finding) -> bool:
    """Return True for a finding on wrong values, not on time."""
    return finding.kind.startswith(_NUMERIC)


def cost_words(cost: FindingCost) -> str:
    """Return a cost in words: "1.2% to 3.4% of the traced time, 1.0 MiB written by casts"; empty if unknown.

    A time without a spread is omitted, because it is a single measurement.
    """
    memory = f"{size(cost.bytes)} written by casts" if cost.bytes else ""
    return ", ".join(filter(None, (time_words(cost), memory)))


def time_words(cost: FindingCost) -> str:
    """Return the share of the time with its spread: "1.2% to 3.4% of the traced time"; empty if unknown."""
    if cost.low is None or cost.high is None:
        return ""
    low, high = share(cost.low), share(cost.high)
    return f"{low if low == high else f'{low} to {high}'} of the traced time"


def _weight(finding: Finding, cost: FindingCost) -> tuple[bool, bool, bool, float]:
    """Return a sort key for importance: wrong values, errors, other advice, observations; each by cost."""
    return (
        is_numeric(finding),
        finding.severity == "error",
        bool(finding.suggestion) and finding.severity != "information",
        0.0 if is_numeric(finding) else cost.seconds or cost.share or 0.0,
    )


def sum_costs(costs: Iterable[FindingCost]) -> FindingCost:
    """Return the sum of costs; shares are at most 1."""
    costs = list(costs)
    part, low, high = (
        _sum(getattr(cost, name) for cost in costs) for name in ("share", "low", "high")
    )
    return FindingCost(
        seconds=_sum(cost.seconds for cost in costs),
        bytes=_sum(cost.bytes for cost in costs),
        share=None if part is None else min(part, 1.0),
        low=None if low is None else min(low, 1.0),
        high=None if high is None else min(high, 1.0),
    )


def _sum(numbers: Iterable[_Number | None]) -> _Number | None:
    """Return the sum of the numbers that are not None; None if all are."""
    values = [number for number in numbers if number is not None]
    return sum(values) if values else None
