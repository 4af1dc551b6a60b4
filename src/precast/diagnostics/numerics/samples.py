"""The counted steps of a monitor, a bounded number of them, as plain data and for display.

Invariant: the plain data needs no PyTorch, and contains neither infinity nor NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from precast._internal.display import Card, plural
from precast._internal.events import HealthEvent, NonfiniteOrigin
from precast.diagnostics.numerics.bins import what_if
from precast.diagnostics.numerics.tally import TensorCounts, TensorKey

__all__ = ["TensorHistory", "health_event"]


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
        steps = [step for step, counts in self._steps if key in counts]
        each = [counts[key] for _, counts in self._steps if key in counts]
        columns = {name: [one.figures[name] for one in each] for name in each[0].figures}
        histograms = columns.pop("exponents")
        exponents = [exponent for row in histograms for exponent in row]
        low, high = min(exponents, default=0), max(exponents, default=-1)
        return {
            "name": key[1],
            "kind": key[0],
            "steps": steps,
            "histogram": {
                "low": low,
                "counts": [[row.get(e, 0) for e in range(low, high + 1)] for row in histograms],
            },
            **columns,
            "what_if": what_if([one.magnitudes for one in each]),
        }


def health_event(step: int, counts: Mapping[TensorKey, TensorCounts]) -> HealthEvent:
    """Return the counts of a step as an event."""
    rows = ({"kind": kind, "name": name, **c.figures} for (kind, name), c in counts.items())
    return HealthEvent(step, tuple(rows))


def _badness(counts: TensorCounts) -> float:
    is_bad = counts.figures["overflow"] or counts.figures["nan"]
    return float("inf") if is_bad else counts.magnitudes.maximum


def _row(key: TensorKey, counts: TensorCounts) -> tuple[object, ...]:
    (kind, name), figures = key, counts.figures
    largest, zeros = counts.magnitudes.maximum, figures["zeros"] / max(1, figures["elements"])
    bad = figures["overflow"] or None, figures["nan"] or None
    return name or "the model", kind, f"{largest:.4g}", f"{zeros:.0%}", *bad
