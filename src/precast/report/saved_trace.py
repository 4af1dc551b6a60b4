"""The data of a trace: rows, totals and findings, which can be saved, loaded and compared. Needs no PyTorch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from precast._internal import atomic_write
from precast._internal.display import Card, Displayed, milliseconds, size
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
from precast.report.trace_difference import TraceDifference, difference_between

__all__ = ["SavedTrace", "data_of"]


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
        return self._recorded().to_dict()

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> SavedTrace:
        """Build a trace from the output of `to_dict`.

        Raises:
            PrecastError: `plain` is not the data of a trace.
        """
        return SavedTrace(TraceData.from_dict(plain))

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
        return difference_between(self._recorded(), other._recorded())

    def _card(self) -> Card:
        data = self._recorded()
        if not data.rows and data.counts:
            return _card_of_counts(data.counts)
        t = data.totals
        facts = [
            f"{size(t.calls, 'call')} in {milliseconds(t.seconds)}",
            f"{size(t.casts, 'cast')} in {milliseconds(t.cast_seconds)}",
            size(len(data.findings), "finding"),
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
    """Return the display of a trace that only counted."""
    calls, casts = sum(count.calls for count in counts), sum(count.casts for count in counts)
    facts = [f"{size(calls, 'call')} with a rule", size(casts, "cast"), "only counted"]
    rows = [(c.op, c.device_type, c.rule, c.calls, c.casts) for c in counts]
    return Card("Trace", facts, ("operation", "device type", "rule", "calls", "casts"), rows)
