"""What a trace saw: rows, totals and findings. It can be written to a file, read from one, and compared with another.

Invariant: nothing here needs PyTorch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from precast._internal import atomic_write
from precast._internal.display import Card, Displayed, milliseconds, size
from precast._internal.version import __version__
from precast.diagnostics.schema import (
    VERSION,
    Count,
    Finding,
    Flow,
    Module,
    Row,
    Totals,
    TraceData,
)
from precast.diagnostics.tracing.difference import Difference
from precast.errors import PrecastError

__all__ = ["SavedTrace"]


class SavedTrace(Displayed):
    """What a trace saw, whether the trace is open, closed, or read from a file."""

    def __init__(self, data: TraceData) -> None:
        self._data = data

    @property
    def data(self) -> TraceData:
        """Everything as plain values."""
        return self._data

    @property
    def rows(self) -> list[Row]:
        """A row for each operation, place and kind of inputs; those that took the most time come first."""
        return self.data.rows

    @property
    def totals(self) -> Totals:
        """The sums."""
        return self.data.totals

    @property
    def findings(self) -> list[Finding]:
        """What could be better, what it costs and how to improve it; what costs most comes first."""
        return self.data.findings

    @property
    def counts(self) -> list[Count]:
        """How often each rule was carried out, in counting mode too."""
        return self.data.counts

    @property
    def flow(self) -> list[Flow]:
        """Casts from each dtype to each other."""
        return self.data.flow

    @property
    def saved(self) -> dict[str, int]:
        """Dtype -> bytes that forward made and that still existed when backward began, of the pass with the most."""
        return self.data.saved

    @property
    def modules(self) -> list[Module]:
        """The modules in which something ran."""
        return self.data.modules

    @property
    def dropped(self) -> int:
        """How many calls have no row, as there were too many kinds of calls; the totals have them."""
        return self.data.dropped

    @property
    def notes(self) -> list[str]:
        """What could not be seen."""
        return self.data.notes

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return self.data.as_dict()

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> SavedTrace:
        """What `as_dict` gave.

        Raises:
            PrecastError: `plain` is no trace.
        """
        return SavedTrace(TraceData.from_dict(plain))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the trace as JSON, whole or not at all; `precast report` reads it.

        Raises:
            OutputError: the file could not be written; what was there stays.
        """
        document = {"schema": VERSION, "precast": __version__, "trace": self.as_dict()}
        atomic_write.replace(Path(path), (json.dumps(document, allow_nan=False) + "\n").encode())

    @staticmethod
    def load(path: str | os.PathLike[str]) -> SavedTrace:
        """What `save` wrote.

        Raises:
            PrecastError: there is no such file, or it is no trace.
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

    def diff(self, other: SavedTrace) -> Difference:
        """What differs in `other`: operations with other dtypes or other rules, and what they cost."""
        return Difference.between(self.data, other.data)

    def _card(self) -> Card:
        data = self.data
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


def _cells(row: Row) -> tuple[object, ...]:
    module = "the model" if row.module == "" else row.module
    dtypes = ", ".join(row.inputs), ", ".join(row.output)
    return module, row.op, row.phase, *dtypes, row.rule, row.calls, milliseconds(row.seconds)


def _card_of_counts(counts: list[Count]) -> Card:
    """How a trace that only counted is displayed."""
    calls, casts = sum(count.calls for count in counts), sum(count.casts for count in counts)
    facts = [f"{size(calls, 'call')} with a rule", size(casts, "cast"), "only counted"]
    rows = [(c.op, c.device, c.rule, c.calls, c.casts) for c in counts]
    return Card("Trace", facts, ("operation", "device type", "rule", "calls", "casts"), rows)
