"""Findings by what mends them: several with one remedy are one, with the sum of their costs.

Invariants: wrong numbers come first, and each has a remedy of its own; then the most expensive. Costs are those of what
was traced.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeVar

from precast.diagnostics.report.words import share, size
from precast.diagnostics.schema import Cost, Document, Finding

__all__ = ["Remedy", "all_findings", "cost_words", "is_numeric", "remedies", "time_words"]
__all__ += ["together"]

_NUMERIC = (
    *("overflow", "underflow", "nonfinite", "nan", "inf", "saturation"),
    *("rounded away", "state rounded away", "average rounded away", "rounded by a rule"),
)
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
        part = self.cost.share if self.cost.low is None else self.cost.low
        return is_numeric(self.worst) or part is None or part >= _TELLING


def all_findings(document: Document) -> list[Finding]:
    """Return the document's findings and the trace's, each once; wrong numbers first, then errors, then by cost."""
    every = [*document.findings, *(document.trace.findings if document.trace else [])]
    once = [each for i, each in enumerate(every) if each not in every[:i]]
    return sorted(once, key=lambda each: _weight(each, each.cost), reverse=True)


def remedies(document: Document) -> list[Remedy]:
    """All findings, those with the same remedy together; wrong numbers first, then the most expensive."""
    groups: dict[object, list[Finding]] = {}
    for number, each in enumerate(all_findings(document)):
        is_alone = is_numeric(each) or not each.suggestion
        key = number if is_alone else (each.suggestion, each.policy)
        groups.setdefault(key, []).append(each)
    found = [Remedy(some, together(each.cost for each in some)) for some in groups.values()]
    return sorted(found, key=lambda each: _weight(each.worst, each.cost), reverse=True)


def is_numeric(finding: Finding) -> bool:
    """Whether it is about wrong numbers, not about time."""
    return finding.kind.startswith(_NUMERIC)


def cost_words(cost: Cost) -> str:
    """A cost: "1.2% to 3.4% of the traced time, 1.0 MiB written by casts"; empty where nothing is known.

    A time is one measurement among others, so it is left out where its spread is not known.
    """
    written = f"{size(cost.bytes)} written by casts" if cost.bytes else ""
    return ", ".join(filter(None, (time_words(cost), written)))


def time_words(cost: Cost) -> str:
    """Return the share of the time with its spread: "1.2% to 3.4% of the traced time"; empty if that is not known."""
    if cost.low is None or cost.high is None:
        return ""
    low, high = share(cost.low), share(cost.high)
    return f"{low if low == high else f'{low} to {high}'} of the traced time"


def _weight(finding: Finding, cost: Cost) -> tuple[bool, bool, bool, float]:
    """Return a key that sorts by importance: wrong numbers, errors, other advice, observations; each by cost."""
    return (
        is_numeric(finding),
        finding.severity == "error",
        bool(finding.suggestion) and finding.severity != "information",
        0.0 if is_numeric(finding) else cost.seconds or cost.share or 0.0,
    )


def together(costs: Iterable[Cost]) -> Cost:
    """Return the sum of costs; shares end at 1."""
    costs = list(costs)
    part, low, high = (
        _sum(getattr(cost, name) for cost in costs) for name in ("share", "low", "high")
    )
    return Cost(
        seconds=_sum(cost.seconds for cost in costs),
        bytes=_sum(cost.bytes for cost in costs),
        share=None if part is None else min(part, 1.0),
        low=None if low is None else min(low, 1.0),
        high=None if high is None else min(high, 1.0),
    )


def _sum(numbers: Iterable[_Number | None]) -> _Number | None:
    """None where nothing is known of any."""
    known = [number for number in numbers if number is not None]
    return sum(known) if known else None
