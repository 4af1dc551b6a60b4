"""Compares two traces: which operations have other dtypes or other rules, and what that costs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from precast._internal.display import Card, Displayed, size
from precast.diagnostics.schema import Row, Totals, TraceData

__all__ = ["Changed", "Difference"]


@dataclass(slots=True)
class Changed:
    """One operation in one place, in two traces; None for a trace that does not have it."""

    module: str | None
    op: str
    phase: str
    source: str | None
    before: Row | None
    after: Row | None

    def __str__(self) -> str:
        where = "".join(f" {text}" for text in (self.module, self.source) if text)
        return f"{self.op}{where} ({self.phase}): {_said(self.before)} -> {_said(self.after)}"


@dataclass(slots=True, repr=False)
class Difference(Displayed):
    """What differs in the second of two traces."""

    rows: list[Changed]
    """Operations with another rule, other dtypes, or another number of casts per call."""
    totals: Totals
    """The totals of the second trace minus those of the first."""

    @classmethod
    def between(cls, first: TraceData, second: TraceData) -> Difference:
        """What differs, with what costs most first; a difference in time alone does not count."""
        before, after = _by_place(first), _by_place(second)
        rows = [
            Changed(*place, before.get(place), after.get(place))
            for place in dict.fromkeys([*before, *after])
            if _meaning(before.get(place)) != _meaning(after.get(place))
        ]
        rows.sort(key=lambda row: -max(r.seconds for r in (row.before, row.after) if r is not None))
        was, now = dataclasses.asdict(first.totals), dataclasses.asdict(second.totals)
        return cls(rows, Totals(**{name: now[name] - was[name] for name in was}))

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return dataclasses.asdict(self)

    def _card(self) -> Card:
        facts = [f"{size(len(self.rows), 'operation')} changed", f"{self.totals.casts:+,} casts"]
        rows = [
            (each.module, each.op, each.phase, _said(each.before), _said(each.after))
            for each in self.rows
        ]
        return Card("Difference", facts, ("module", "operation", "phase", "before", "after"), rows)

    def __str__(self) -> str:
        t = self.totals
        sums = f"{t.casts:+,} casts, {t.cast_bytes:+,} bytes, {t.seconds:+.3g} s"
        return "\n".join([sums, *map(str, self.rows)])


_Place = tuple[str | None, str, str, str | None]


def _by_place(traced: TraceData) -> dict[_Place, Row]:
    """One row for each place, with several kinds of inputs added up."""
    found: dict[_Place, Row] = {}
    for row in sorted(traced.rows, key=lambda row: (row.inputs, row.output)):
        place = row.module, row.op, row.phase, row.source
        known = found.get(place)
        found[place] = row if known is None else _together(known, row)
    return found


def _together(one: Row, other: Row) -> Row:
    sums = {
        name: getattr(one, name) + getattr(other, name)
        for name in ("calls", "casts", "cast_bytes", "cached", "seconds", "cast_seconds")
    }
    inputs, output = [*one.inputs, *other.inputs], [*one.output, *other.output]
    return dataclasses.replace(one, inputs=inputs, output=output, **sums)


def _meaning(row: Row | None) -> Any:
    if row is None:
        return None
    return row.rule, row.inputs, row.output, row.casts / max(1, row.calls)


def _said(row: Row | None) -> str:
    if row is None:
        return "nothing"
    rule = row.rule or "no rule"
    return f"{rule}, {'+'.join(row.output) or 'nothing'}, {row.casts} casts in {row.calls} calls"
