"""The counted steps of a monitor, a bounded number of them, as plain data and for display.

Invariant: the plain data needs no PyTorch, and contains neither infinity nor NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from precast._internal.display import Card, plural
from precast._internal.events import HealthEvent, NonfiniteOrigin
from precast.diagnostics.numerics.bins import exponents, what_if
from precast.diagnostics.numerics.tally import TensorCounts, TensorKey

__all__ = ["TensorHistory", "figures", "health_event"]


class TensorHistory:
    """Counts of tensors, by step; at most `keep` steps."""

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self._steps: list[tuple[int, Mapping[TensorKey, TensorCounts]]] = []

    def add(self, step: int, counts: Mapping[TensorKey, TensorCounts]) -> None:
        """Store a step. If there are too many, every other one is dropped, but never the new one."""
        self._steps.append((step, counts))
        if len(self._steps) > self.keep:
            self._steps = [*self._steps[:-1:2], self._steps[-1]]

    def events(self) -> tuple[HealthEvent, ...]:
        """Return the stored steps, oldest first, as observers receive them."""
        return tuple(health_event(step, counts) for step, counts in self._steps)

    def card(self, steps: int, first: NonfiniteOrigin | None) -> Card:
        """Return the display of a monitor of so many steps; the table shows the latest counted step."""
        facts = [plural(steps, "step"), f"{len(self._steps):,} of them counted"]
        if first is not None:
            facts.append(f"first {first.what} in step {first.step}: {first.kind} of {first.name!r}")
        if not self._steps:
            return Card("Monitor", facts)
        latest, counts = self._steps[-1]
        rows = [_row(*item) for item in sorted(counts.items(), key=lambda item: -_badness(item[1]))]
        columns = ("tensor", "kind", "largest", "zeros", "infinite", "NaN")
        return Card("Monitor", facts, columns, rows, f"tensors in step {latest}")

    def as_list(self, order: Iterable[TensorKey]) -> list[dict[str, Any]]:
        """Return an entry for each counted tensor, first those of `order`, in that order."""
        keys = dict.fromkeys(key for _, counts in self._steps for key in counts)
        first = dict.fromkeys(key for key in order if key in keys)
        return [self._entry(key) for key in first | keys]

    def _entry(self, key: TensorKey) -> dict[str, Any]:
        mine = [(step, counts[key]) for step, counts in self._steps if key in counts]
        rows = [figures(counts) for _, counts in mine]
        histograms = [row.pop("exponents") for row in rows]
        low = min((e for row in histograms for e in row), default=0)
        high = max((e for row in histograms for e in row), default=-1)
        tables = [[row.get(e, 0) for e in range(low, high + 1)] for row in histograms]
        kind, name = key
        updates = [counts.updates for _, counts in mine]
        lost = {
            "updates_rounded_away": [u and u.rounded_away for u in updates],
            "updates_lost": [u and u.lost for u in updates],
            "updates_rounded_away_with_kahan": [u and u.with_kahan for u in updates],
            "states_rounded_away": [dict(u.states) if u else {} for u in updates],
            "average_rounded_away": [counts.average for _, counts in mine],
        }
        return {
            "name": name,
            "kind": kind,
            "steps": [step for step, _ in mine],
            "histogram": {"low": low, "counts": tables},
            **{column: [row[column] for row in rows] for column in rows[0]},
            "what_if": what_if([counts.magnitudes for _, counts in mine]),
            **(lost if kind == "parameter" else {}),
        }


def health_event(step: int, counts: Mapping[TensorKey, TensorCounts]) -> HealthEvent:
    """Return the counts of a step as an event."""
    rows = ({"kind": kind, "name": name, **figures(c)} for (kind, name), c in counts.items())
    return HealthEvent(step, tuple(rows))


def figures(counts: TensorCounts) -> dict[str, Any]:
    """Return the counts of one tensor in one step; "exponents" maps binary exponents to numbers of values."""
    is_some_finite = counts.infinite + counts.nan < counts.elements
    return {
        "exponents": exponents(counts.magnitudes),
        "elements": counts.elements,
        "zeros": counts.zeros,
        "underflow_zeros": counts.lost or 0,
        "underflow_known": counts.lost is not None,
        "subnormal": counts.subnormal,
        "overflow": counts.infinite,
        "saturated": counts.saturated,
        "nan": counts.nan,
        "maximum": counts.magnitudes.maximum if is_some_finite else None,
        "rms": counts.rms if is_some_finite else None,
    }


def _badness(counts: TensorCounts) -> float:
    return float("inf") if counts.infinite or counts.nan else counts.magnitudes.maximum


def _row(key: TensorKey, counts: TensorCounts) -> tuple[object, ...]:
    kind, name = key
    largest, zeros = f"{counts.magnitudes.maximum:.4g}", counts.zeros / max(1, counts.elements)
    bad = counts.infinite or None, counts.nan or None
    return name or "the model", kind, largest, f"{zeros:.0%}", *bad
