"""The sums of a trace: rows, totals, and casts by their dtypes.

Invariant: there are at most `MOST_ROWS` rows; calls of further kinds are in the totals, and counted as dropped.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from torch import Tensor

from precast.diagnostics.tracing.reasons import RuleDecision
from precast.engine.operator_kinds import Cast, dtype_of
from precast.report.schema import CastFlow, OperationRow, Phase, TraceTotals

__all__ = ["MOST_ROWS", "CallPlace", "Surroundings", "TraceTally"]

MOST_ROWS: Final = 10_000


class CallPlace(NamedTuple):
    """The place of an operation."""

    module: str | None
    source: str | None
    phase: Phase

    def forward(self) -> CallPlace:
        """Return the same place, with the phase "forward" if it is outside of all modules."""
        return CallPlace(self.module, self.source, "forward") if self.phase == "other" else self


class Surroundings(NamedTuple):
    """The region, module rule and device type of an operation."""

    region: str | None
    module_rule: str | None
    device: str


class CastFlows(dict[tuple[str, str], CastFlow]):
    """The casts by their dtypes; a missing pair of dtypes starts at zero."""

    def __missing__(self, dtypes: tuple[str, str]) -> CastFlow:
        flow = self[dtypes] = CastFlow(*dtypes)
        return flow

    def add(self, cast: Cast) -> None:
        """Count a cast."""
        flow = self[dtype_of(cast.source), dtype_of(cast.target)]
        flow.casts += 1
        flow.bytes += cast.bytes
        flow.seconds += cast.seconds


class TraceTally:
    """The sums of one trace."""

    def __init__(self) -> None:
        self.rows: dict[tuple[Any, ...], OperationRow] = {}
        self.totals = TraceTotals()
        self.flow = CastFlows()
        self.inside = CastFlows()
        """The casts inside operations, which neither a rule nor the program causes; `flow` has them, too."""
        self.dropped = 0

    def row(
        self,
        place: CallPlace,
        decision: RuleDecision,
        inputs: tuple[str, ...],
        outputs: list[Tensor],
        around: Surroundings,
    ) -> OperationRow | None:
        """Count a call in its row, and return the row; None if there are too many rows."""
        self.totals.calls += 1
        output = tuple(map(dtype_of, outputs))
        key = place, decision, inputs, output, around
        row = self.rows.get(key)
        if row is None:
            if len(self.rows) >= MOST_ROWS:
                self.dropped += 1
                return None
            op, rule, reason = decision
            row = self.rows[key] = OperationRow(
                place.module, op, place.phase, place.source, list(inputs), list(output), rule, reason, *around,
                order=len(self.rows),
            )  # fmt: skip
        row.calls += 1
        return row

    def cast(self, cast: Cast, own: OperationRow | TraceTotals | None) -> None:
        """Count a cast in the totals and in the sums of its operation."""
        self.flow.add(cast)
        for sums in (self.totals, own):
            if sums is not None:
                sums.casts += 1
                sums.cast_bytes += cast.bytes
                sums.cast_seconds += cast.seconds

    def cast_inside(self, cast: Cast, own: OperationRow | TraceTotals | None) -> None:
        """Count a cast inside an operation."""
        self.cast(cast, own)
        self.inside.add(cast)
