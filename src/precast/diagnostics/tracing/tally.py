"""The sums of a trace: rows by what describes them, totals, and casts by their dtypes.

Invariants: there are at most `MOST_ROWS` rows; calls of further kinds are in the totals, and counted as dropped.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from torch import Tensor

from precast.diagnostics.schema import Flow, Phase, Row, Totals
from precast.diagnostics.tracing.operators import text_of
from precast.diagnostics.tracing.reasons import Decided

__all__ = ["MOST_ROWS", "Around", "Place", "Tally"]

MOST_ROWS: Final = 10_000


class Place(NamedTuple):
    """Where an operation runs."""

    module: str | None
    source: str | None
    phase: Phase

    def forward(self) -> Place:
        """The same, but that what is in no module is part of forward as well."""
        return Place(self.module, self.source, "forward") if self.phase == "other" else self


class Around(NamedTuple):
    """What is around an operation."""

    region: str | None
    module_rule: str | None
    device: str


class Tally:
    """The sums."""

    def __init__(self) -> None:
        self.rows: dict[tuple[Any, ...], Row] = {}
        self.totals = Totals()
        self.flow: dict[tuple[str, str], Flow] = {}
        self.inside: dict[tuple[str, str], Flow] = {}
        """Of these, the casts inside operations, which no rule and no program asks for."""
        self.dropped = 0

    def row(
        self,
        place: Place,
        decided: Decided,
        inputs: tuple[str, ...],
        outputs: list[Tensor],
        around: Around,
    ) -> Row | None:
        """The row of a call, counted there; None where there are too many."""
        self.totals.calls += 1
        output = tuple(map(text_of, outputs))
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

    def cast(self, source: Tensor, target: Tensor, seconds: float) -> int:
        """Counts a cast; gives the bytes that it wrote."""
        size = target.numel() * target.element_size()
        self.totals.casts += 1
        self.totals.cast_bytes += size
        self.totals.cast_seconds += seconds
        _add(self.flow, source, target, size, seconds)
        return size

    def cast_inside(self, source: Tensor, target: Tensor, seconds: float) -> int:
        """Counts a cast inside an operation; gives the bytes that it wrote."""
        size = self.cast(source, target, seconds)
        _add(self.inside, source, target, size, seconds)
        return size


def _add(
    flows: dict[tuple[str, str], Flow], source: Tensor, target: Tensor, size: int, seconds: float
) -> None:
    key = text_of(source), text_of(target)
    flow = flows.get(key)
    if flow is None:
        flow = flows[key] = Flow(*key)
    flow.casts += 1
    flow.bytes += size
    flow.seconds += seconds
