"""Comparison of two traces: operations with other dtypes or other rules, and the difference in cost."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from precast._internal.display import Card, Displayed, size
from precast.report.schema import OperationRow, TraceData, TraceTotals

__all__ = ["ChangedOperation", "TraceDifference", "difference_between"]


@dataclass(slots=True)
class ChangedOperation:
    """One operation in one place, in two traces; None for a trace without it."""

    module: str | None
    op: str
    phase: str
    source: str | None
    before: OperationRow | None
    after: OperationRow | None

    def __str__(self) -> str:
        where = "".join(f" {text}" for text in (self.module, self.source) if text)
        return (
            f"{self.op}{where} ({self.phase}): {_describe(self.before)} -> {_describe(self.after)}"
        )


@dataclass(slots=True, repr=False)
class TraceDifference(Displayed):
    """The difference between two traces."""

    rows: list[ChangedOperation]
    """Operations with another rule, other dtypes, or another number of casts per call."""
    totals: TraceTotals
    """The totals of the second trace minus those of the first."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return dataclasses.asdict(self)

    def _card(self) -> Card:
        facts = [f"{size(len(self.rows), 'operation')} changed", f"{self.totals.casts:+,} casts"]
        rows = [
            (each.module, each.op, each.phase, _describe(each.before), _describe(each.after))
            for each in self.rows
        ]
        return Card(
            "TraceDifference", facts, ("module", "operation", "phase", "before", "after"), rows
        )

    def __str__(self) -> str:
        t = self.totals
        sums = f"{t.casts:+,} casts, {t.cast_bytes:+,} bytes, {t.seconds:+.3g} s"
        return "\n".join([sums, *map(str, self.rows)])


def difference_between(first: TraceData, second: TraceData) -> TraceDifference:
    """Compare two traces, the most expensive operations first; a difference in time alone does not count."""
    before, after = _by_place(first), _by_place(second)
    rows = [
        ChangedOperation(*place, before.get(place), after.get(place))
        for place in dict.fromkeys([*before, *after])
        if _compared(before.get(place)) != _compared(after.get(place))
    ]
    rows.sort(key=lambda row: -max(r.seconds for r in (row.before, row.after) if r is not None))
    old, new = dataclasses.asdict(first.totals), dataclasses.asdict(second.totals)
    return TraceDifference(rows, TraceTotals(**{name: new[name] - old[name] for name in old}))


_CallPlace = tuple[str | None, str, str, str | None]


def _by_place(traced: TraceData) -> dict[_CallPlace, OperationRow]:
    """Return one row for each place, the sum over several kinds of inputs."""
    rows: dict[_CallPlace, OperationRow] = {}
    for row in sorted(traced.rows, key=lambda row: (row.inputs, row.output)):
        place = row.module, row.op, row.phase, row.source
        rows[place] = _sum(rows[place], row) if place in rows else row
    return rows


def _sum(one: OperationRow, other: OperationRow) -> OperationRow:
    sums = {
        name: getattr(one, name) + getattr(other, name)
        for name in ("calls", "casts", "cast_bytes", "cached", "seconds", "cast_seconds")
    }
    inputs, output = [*one.inputs, *other.inputs], [*one.output, *other.output]
    return dataclasses.replace(one, inputs=inputs, output=output, **sums)


def _compared(row: OperationRow | None) -> Any:
    if row is None:
        return None
    return row.rule, row.inputs, row.output, row.casts / max(1, row.calls)


def _describe(row: OperationRow | None) -> str:
    if row is None:
        return "nothing"
    rule = row.rule or "no rule"
    return f"{rule}, {'+'.join(row.output) or 'nothing'}, {row.casts} casts in {row.calls} calls"
