"""The record of a call, and the sums over all calls of a trace: rows, totals, and casts by their dtypes.

Invariant: there are at most `MOST_ROWS` rows; calls of further kinds are in the totals, and counted as dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from torch import Tensor

from precast.diagnostics.tracing.lineage import Origin, Upcast
from precast.diagnostics.tracing.reasons import RuleDecision
from precast.diagnostics.tracing.trials import TrialCall
from precast.engine.operator_kinds import Cast, dtype_of
from precast.policy.policy import Policy
from precast.report.schema import CastFlow, FindingLocation, OperationRow, Phase, TraceTotals

__all__ = ["MOST_ROWS", "CallPlace", "Surroundings", "TraceTally", "TracedCall"]

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


@dataclass(slots=True)
class TracedCall:
    """A call of an operation: one with a rule while the rule is applied, another one after it has run."""

    call: TrialCall
    device: str
    policy: Policy
    decision: RuleDecision
    place: CallPlace
    inputs: tuple[str, ...]
    """The dtypes of its tensors."""
    origins: list[Origin | None] = field(default_factory=list)
    """The origins of its floating-point inputs."""
    upcasts: list[Upcast] = field(default_factory=list)
    """The casts to a wider dtype that its rule made."""
    rule_casts: int = 0
    """The number of casts that its rule made. `sums` also counts those inside operations."""
    mismatched: int = 0
    """The number of inputs whose dtype is not that of the rule."""
    sums: TraceTotals = field(default_factory=TraceTotals)

    @property
    def where(self) -> FindingLocation:
        """The operation and its place."""
        return FindingLocation(self.place.module, self.decision.op, self.place.source)


class CastFlows(dict[tuple[str, str], CastFlow]):
    """The casts by their dtypes; a missing pair of dtypes starts at zero."""

    def __missing__(self, dtypes: tuple[str, str]) -> CastFlow:
        flow = self[dtypes] = CastFlow(*dtypes)
        return flow


class TraceTally:
    """The sums of one trace."""

    def __init__(self) -> None:
        self.rows: dict[tuple[Any, ...], OperationRow] = {}
        self.totals = TraceTotals()
        self.flow = CastFlows()
        self.inside = CastFlows()
        """The casts inside operations, which neither a rule nor the program causes; `flow` has them, too."""
        self.dropped = 0

    def add(self, call: TracedCall, outputs: list[Tensor], around: Surroundings) -> None:
        """Add a call to the totals and to its row, unless there are too many rows."""
        sums, row = call.sums, self._row(call, outputs, around)
        for total in (self.totals,) if row is None else (self.totals, row):
            total.calls += 1
            total.casts += sums.casts
            total.cast_bytes += sums.cast_bytes
            total.cast_seconds += sums.cast_seconds
            total.cached += sums.cached
            total.seconds += sums.seconds

    def add_cast(self, cast: Cast, call: TracedCall, *, is_inside: bool = False) -> None:
        """Count a cast of a call, or one inside the operation."""
        sums, dtypes = call.sums, (dtype_of(cast.source), dtype_of(cast.target))
        for flows in (self.flow, self.inside) if is_inside else (self.flow,):
            flows[dtypes].casts += 1
            flows[dtypes].bytes += cast.bytes
            flows[dtypes].seconds += cast.seconds
        sums.casts += 1
        sums.cast_bytes += cast.bytes
        sums.cast_seconds += cast.seconds

    def _row(
        self, call: TracedCall, outputs: list[Tensor], around: Surroundings
    ) -> OperationRow | None:
        place, inputs, output = call.place, call.inputs, tuple(map(dtype_of, outputs))
        key = place, call.decision, inputs, output, around
        row = self.rows.get(key)
        if row is None:
            if len(self.rows) >= MOST_ROWS:
                self.dropped += 1
                return None
            op, rule, reason = call.decision
            row = self.rows[key] = OperationRow(
                place.module, op, place.phase, place.source, list(inputs), list(output), rule, reason, *around,
                order=len(self.rows),
            )  # fmt: skip
        return row
