"""The results of a trace: its data, the difference from another trace, and the operations that led to a dtype.

Invariant: nothing here needs PyTorch; dtypes are text ("bfloat16").
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from precast._internal import atomic_write
from precast._internal.display import Card, Displayed, milliseconds, plural
from precast._internal.records import MismatchError, as_json, from_json
from precast._internal.version import __version__
from precast.errors import PrecastError
from precast.report.schema import (
    VERSION,
    CastFlow,
    Finding,
    OperationRow,
    RuleCount,
    TraceData,
    TracedModule,
    TraceTotals,
)

__all__ = [
    "ChangedOperation",
    "Explanation",
    "LineageStep",
    "SavedTrace",
    "TraceDifference",
    "data_of",
]


class SavedTrace(Displayed):
    """The data of a trace that is open, closed, or read from a file."""

    def __init__(self, data: TraceData) -> None:
        self._data = data

    def _recorded(self) -> TraceData:
        """Return all data of the trace."""
        return self._data

    @property
    def rows(self) -> list[OperationRow]:
        """A row for each operation, place and kind of inputs; those that took the most time come first."""
        return self._recorded().rows

    @property
    def totals(self) -> TraceTotals:
        """The sums."""
        return self._recorded().totals

    @property
    def findings(self) -> list[Finding]:
        """Possible improvements with their costs, the most expensive first."""
        return self._recorded().findings

    @property
    def counts(self) -> list[RuleCount]:
        """The applications of each rule, in counting mode too."""
        return self._recorded().counts

    @property
    def flow(self) -> list[CastFlow]:
        """The casts between each pair of dtypes."""
        return self._recorded().flow

    @property
    def saved(self) -> dict[str, int]:
        """Maps each dtype to the bytes of forward's results that existed when backward began, in the largest pass."""
        return self._recorded().saved

    @property
    def modules(self) -> list[TracedModule]:
        """The modules in which something ran."""
        return self._recorded().modules

    @property
    def dropped(self) -> int:
        """The number of calls without a row, because there were too many kinds of calls; the totals include them."""
        return self._recorded().dropped

    @property
    def notes(self) -> list[str]:
        """Limits of what was recorded."""
        return self._recorded().notes

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        plain: dict[str, Any] = as_json(self._recorded())
        return plain

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> SavedTrace:
        """Build a trace from the output of `to_dict`.

        Raises:
            PrecastError: a key is missing, or a value has another type; the message has the path.
        """
        try:
            return SavedTrace(from_json(TraceData, dict(plain), "trace"))
        except MismatchError as error:
            raise PrecastError(f"this is not a trace of precast, at {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace as JSON, completely or not at all.

        Raises:
            OutputError: the file could not be written. An existing file is not changed.
        """
        document = {"schema": VERSION, "precast": __version__, "trace": self.to_dict()}
        atomic_write.replace(Path(path), (json.dumps(document, allow_nan=False) + "\n").encode())

    @staticmethod
    def load(path: str | os.PathLike[str]) -> SavedTrace:
        """Read a trace that `save` wrote.

        Raises:
            PrecastError: the file cannot be read, or is not a trace.
        """
        try:
            document = json.loads(Path(path).read_bytes())
        except (OSError, ValueError) as error:
            raise PrecastError(f"cannot read a trace from {os.fspath(path)}: {error}") from error
        if not isinstance(document, dict) or document.get("schema") != VERSION:
            raise PrecastError(
                f"{os.fspath(path)} is no trace of schema {VERSION}: save one with trace.save(path)"
            )
        return SavedTrace.from_dict(document.get("trace") or {})

    def diff(self, other: SavedTrace) -> TraceDifference:
        """Compare with another trace: operations with other dtypes or rules there, and the difference in cost."""
        return _difference(self._recorded(), other._recorded())

    def _card(self) -> Card:
        data = self._recorded()
        if not data.rows and data.counts:
            return _card_of_counts(data.counts)
        t = data.totals
        facts = [
            f"{plural(t.calls, 'call')} in {milliseconds(t.seconds)}",
            f"{plural(t.casts, 'cast')} in {milliseconds(t.cast_seconds)}",
            plural(len(data.findings), "finding"),
        ]
        columns = ("module", "operation", "phase", "inputs", "output", "rule", "calls", "time")
        return Card("Trace", facts, columns, [_cells(row) for row in data.rows])


def data_of(trace: SavedTrace) -> TraceData:
    """Return the data of a trace as it is stored in the document of a run."""
    return trace._recorded()


def _cells(row: OperationRow) -> tuple[object, ...]:
    module = "the model" if row.module == "" else row.module
    dtypes = ", ".join(row.inputs), ", ".join(row.output)
    return module, row.op, row.phase, *dtypes, row.rule, row.calls, milliseconds(row.seconds)


def _card_of_counts(counts: list[RuleCount]) -> Card:
    calls, casts = sum(count.calls for count in counts), sum(count.casts for count in counts)
    facts = [f"{plural(calls, 'call')} with a rule", plural(casts, "cast"), "only counted"]
    rows = [(c.op, c.device_type, c.rule, c.calls, c.casts) for c in counts]
    return Card("Trace", facts, ("operation", "device type", "rule", "calls", "casts"), rows)


# --- two traces ---


@dataclass(slots=True)
class ChangedOperation:
    """One operation in one place, in two traces; None for a trace without it."""

    module: str | None
    op: str
    phase: str
    source: str | None
    before: OperationRow | None
    after: OperationRow | None


@dataclass(slots=True)
class TraceDifference:
    """The difference between two traces."""

    rows: list[ChangedOperation]
    """Operations with another rule, other dtypes, or another number of casts per call."""
    totals: TraceTotals
    """The totals of the second trace minus those of the first."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return dataclasses.asdict(self)


def _difference(first: TraceData, second: TraceData) -> TraceDifference:
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


# --- the dtype of a tensor ---


@dataclass(frozen=True, slots=True)
class LineageStep:
    """One of the operations that led to a tensor's dtype."""

    op: str
    module: str | None
    source: str | None
    inputs: list[str]
    output: str
    rule: str | None
    reason: str

    def __str__(self) -> str:
        rule = "no rule" if self.rule is None else f"rule {self.rule}"
        where = f" in {self.module}" if self.module else ""
        where += f" at {self.source}" if self.source else ""
        dtypes = f"{', '.join(self.inputs)} -> {self.output}"
        return f"{self.op} ({dtypes}){where}: {rule}, {self.reason}"


@dataclass(frozen=True, slots=True)
class Explanation:
    """The derivation of a tensor's dtype; as text, a line for each step."""

    dtype: str
    steps: list[LineageStep]
    """The latest step first. The last one decided: a rule, a cast, or the first recorded operation."""

    def __str__(self) -> str:
        if not self.steps:
            is_followed = "float" in self.dtype
            why = "it was not created while the full trace was open"
            return f"{self.dtype}: {why if is_followed else 'only floating-point tensors are followed'}"
        return "\n".join([f"{self.dtype}, because of", *(f"  {step}" for step in self.steps)])
