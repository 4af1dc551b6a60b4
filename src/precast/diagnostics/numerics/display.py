"""What a monitor shows of itself: how many steps it saw, where one first went wrong, its largest tensors."""

from __future__ import annotations

from precast._internal.display import Card, size
from precast._internal.events import NonfiniteOrigin
from precast.diagnostics.numerics.samples import Key, Samples
from precast.diagnostics.numerics.tally import Counts

__all__ = ["card"]

_COLUMNS = ("tensor", "kind", "largest", "zeros", "infinite", "NaN")


def card(steps: int, samples: Samples, first: NonfiniteOrigin | None) -> Card:
    """Of so many steps; the table is of the one that was counted last."""
    facts = [size(steps, "step"), f"{len(samples):,} of them counted"]
    if first is not None:
        facts.append(f"first {first.what} in step {first.step}: {first.kind} of {first.name!r}")
    latest = samples.latest()
    if latest is None:
        return Card("Monitor", facts)
    worst = sorted(latest[1].items(), key=lambda item: -_badness(item[1]))
    rows = [_row(key, counts) for key, counts in worst]
    return Card("Monitor", facts, _COLUMNS, rows, f"tensors in step {latest[0]}")


def _badness(counts: Counts) -> float:
    """Infinite for a tensor that has numbers which are not finite, else its largest number."""
    return float("inf") if counts.infinite or counts.nan else counts.magnitudes.maximum or 0.0


def _row(key: Key, counts: Counts) -> tuple[object, ...]:
    kind, name = key
    largest, zeros = counts.magnitudes.maximum, counts.zeros / max(1, counts.elements)
    largest_text = None if largest is None else f"{largest:.4g}"
    bad = counts.infinite or None, counts.nan or None
    return name or "the model", kind, largest_text, f"{zeros:.0%}", *bad
