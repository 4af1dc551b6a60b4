"""The steps whose numbers were counted, a bounded number of them, and what they say as plain data.

Invariants: what is given away needs no PyTorch to read, and holds neither infinity nor NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from precast.diagnostics.numerics.bins import exponents, what_if
from precast.diagnostics.numerics.tally import Counts

__all__ = ["Samples", "figures"]

Key = tuple[str, str]
"""A tensor's kind and name."""


class Samples:
    """Counts of tensors, by step."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._steps: list[tuple[int, Mapping[Key, Counts]]] = []

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: int, counts: Mapping[Key, Counts]) -> None:
        """Keeps a step; where there are too many, every other one is dropped, but for this."""
        self._steps.append((step, counts))
        if len(self._steps) > self._keep:
            self._steps = [*self._steps[:-1:2], self._steps[-1]]

    def clear(self) -> None:
        """Forgets them."""
        self._steps = []

    def latest(self) -> tuple[int, Mapping[Key, Counts]] | None:
        """The step that was counted last, and its counts; None before the first."""
        return self._steps[-1] if self._steps else None

    def as_list(self, order: Iterable[Key]) -> list[dict[str, Any]]:
        """One entry a tensor, in the order given; of those that were counted."""
        keys = dict.fromkeys(key for key in order)
        keys |= dict.fromkeys(key for _, counts in self._steps for key in counts)
        return [entry for key in keys if (entry := self._entry(key))]

    def _entry(self, key: Key) -> dict[str, Any]:
        mine = [(step, counts[key]) for step, counts in self._steps if key in counts]
        if not mine:
            return {}
        kind, name = key
        rows = [figures(counts) for _, counts in mine]
        found = [row.pop("exponents") for row in rows]
        low = min((e for row in found for e in row), default=0)
        high = max((e for row in found for e in row), default=-1)
        counted = [[row.get(e, 0) for e in range(low, high + 1)] for row in found]
        return {
            "name": name,
            "kind": kind,
            "steps": [step for step, _ in mine],
            "histogram": {"low": low, "counts": counted},
            **{column: [row[column] for row in rows] for column in rows[0]},
            "what_if": what_if([counts.magnitudes for _, counts in mine]),
        }


def figures(counts: Counts) -> dict[str, Any]:
    """Of one tensor in one step: the numbers, and "exponents": exponent -> how many."""
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
