"""Findings by what mends them: several with one remedy are one, with the sum of their costs.

Invariants: wrong numbers come first, and each has a remedy of its own; then the most expensive. Costs are those of what
was traced.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeVar

from precast.diagnostics.report.words import duration, share, size
from precast.diagnostics.schema import Cost, Document, Finding

__all__ = ["Remedy", "all_findings", "cost_words", "is_numeric", "remedies"]

_NUMERIC = ("overflow", "underflow", "nonfinite", "nan", "inf", "saturation", "rounded away")
_Number = TypeVar("_Number", int, float)
_TELLING = 0.01  # of the traced time: what costs less is not worth a card, or a sentence


class Remedy(NamedTuple):
    """What mends one finding or several."""

    findings: list[Finding]
    cost: Cost
    """The cost of all of them together."""

    @property
    def worst(self) -> Finding:
        """The most expensive of them."""
        return self.findings[0]

    @property
    def is_telling(self) -> bool:
        """Whether it is worth a reader's time: numbers are wrong, the cost is not small, or nobody knows it."""
        part = self.cost.share
        return is_numeric(self.worst) or part is None or part >= _TELLING


def all_findings(document: Document) -> list[Finding]:
    """The document's findings and the trace's, each once; wrong numbers first, then the most expensive."""
    every = [*document.findings, *(document.trace.findings if document.trace else [])]
    once = [each for i, each in enumerate(every) if each not in every[:i]]
    return sorted(once, key=lambda each: -_weight(each, each.cost))


def remedies(document: Document) -> list[Remedy]:
    """All findings, those with the same remedy together; wrong numbers first, then the most expensive."""
    groups: dict[object, list[Finding]] = {}
    for number, each in enumerate(all_findings(document)):
        key = number if is_numeric(each) else (each.suggestion, each.policy)
        groups.setdefault(key, []).append(each)
    found = [Remedy(some, _together([each.cost for each in some])) for some in groups.values()]
    return sorted(found, key=lambda each: -_weight(each.worst, each.cost))


def is_numeric(finding: Finding) -> bool:
    """Whether it is about wrong numbers, not about time."""
    return finding.kind.startswith(_NUMERIC)


def cost_words(cost: Cost) -> str:
    """A cost: "3.4% of the traced time, 20 ms, 1.0 MiB written by casts"; empty where nothing is known."""
    parts = []
    if cost.share is not None:
        parts.append(f"{share(cost.share)} of the traced time")
    if cost.seconds is not None:
        parts.append(duration(cost.seconds))
    if cost.bytes:
        parts.append(f"{size(cost.bytes)} written by casts")
    return ", ".join(parts)


def _weight(finding: Finding, cost: Cost) -> float:
    return 1e9 if is_numeric(finding) else cost.seconds or cost.share or 0.0


def _together(costs: list[Cost]) -> Cost:
    part = _sum(cost.share for cost in costs)
    return Cost(
        seconds=_sum(cost.seconds for cost in costs),
        bytes=_sum(cost.bytes for cost in costs),
        share=None if part is None else min(part, 1.0),
    )


def _sum(numbers: Iterable[_Number | None]) -> _Number | None:
    """None where nothing is known of any."""
    known = [number for number in numbers if number is not None]
    return sum(known) if known else None
