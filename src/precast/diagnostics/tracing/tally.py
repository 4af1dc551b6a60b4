"""The sums of a trace: rows by what describes them, totals, and casts by their dtypes.

Invariants: there are at most `MOST_ROWS` rows; calls of further kinds are in the totals, and counted as dropped.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from torch import Tensor

from precast.diagnostics.schema import Flow, Phase, Row, Totals
from precast.diagnostics.tracing.reasons import Decided
from precast.engine.operator_kinds import Cast, dtype_of

__all__ = ["MOST_ROWS", "Around", "Place", "Tally"]

MOST_ROWS: Final = 10_000


class Place(NamedTuple):
    """Where an operation runs."""

    module: str | None
    source: str | None
    phase: Phase

    def forward(self) -> Place:
        """The same place, with what runs outside of all modules taken for a part of forward."""
        return Place(self.module, self.source, "forward") if self.phase == "other" else self


class Around(NamedTuple):
    """What is around an operation."""

    region: str | None
    module_rule: str | None
    device: str


class Flows(dict[tuple[str, str], Flow]):
    """The casts by their dtypes; a missing pair of dtypes starts at zero."""

    def __missing__(self, dtypes: tuple[str, str]) -> Flow:
        flow = self[dtypes] = Flow(*dtypes)
        return flow

    def add(self, cast: Cast) -> None:
        """Counts a cast."""
        flow = self[dtype_of(cast.source), dtype_of(cast.target)]
        flow.casts += 1
        flow.bytes += cast.bytes
        flow.seconds += cast.seconds


class Tally:
    """The sums."""

    def __init__(self) -> None:
        self.rows: dict[tuple[Any, ...], Row] = {}
        self.totals = Totals()
        self.flow = Flows()
        self.inside = Flows()
        """Of these casts, those inside operations, which no rule and no program asks for."""
        self.dropped = 0

    def row(
        self,
        place: Place,
        decided: Decided,
        inputs: tuple[str, ...],
        outputs: list[Tensor],
        around: Around,
    ) -> Row | None:
        """Counts a call in its row, which is returned; None if there are too many rows."""
        self.totals.calls += 1
        output = tuple(map(dtype_of, outputs))
        key = place, decided, inputs, output, around
        row = self.rows.get(key)
        if row is None:
            if len(self.rows) >= MOST_ROWS:
                self.dropped += 1
                return None
            op, rule, reason = decided
            row = self.rows[key] = Row(
                place.module, op, place.phase, place.source, list(inputs), list(output), rule, reason, *around,
                order=len(self.rows),
            )  # fmt: skip
        row.calls += 1
        return row

    def cast(self, cast: Cast, own: Row | Totals | None) -> None:
        """Counts a cast in the totals and in the sums of its operation."""
        self.flow.add(cast)
        for sums in (self.totals, own):
            if sums is not None:
                sums.casts += 1
                sums.cast_bytes += cast.bytes
                sums.cast_seconds += cast.seconds

    def cast_inside(self, cast: Cast, own: Row | Totals | None) -> None:
        """Counts a cast inside an operation."""
        self.cast(cast, own)
        self.inside.add(cast)
