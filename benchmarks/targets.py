"""What precast means to reach, as ratios of times, and whether rows of `python -m benchmarks models` reach it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.models import WIDTHS
from benchmarks.variants import ACCUMULATION, INFERENCE, LOWER_GRADIENTS, TRAINING

__all__ = ["TARGETS", "Result", "Target", "results"]


@dataclass(frozen=True)
class Target:
    """The most that a variant's time may be of torch.autocast's, and of what is written by hand."""

    title: str
    kind: str
    work: str
    cases: tuple[str, ...]
    ratio: float
    by_hand: float | None = None


@dataclass(frozen=True)
class Result:
    """A target in one case: the row that was measured, None where none was."""

    target: Target
    case: str
    row: dict[str, Any] | None

    def met(self, figure: str) -> bool | None:
        """Whether the median of "ratio" or "by_hand" is within the target; None where one of them is missing."""
        limit = getattr(self.target, figure)
        return None if self.row is None or limit is None else self.row[figure] <= limit


def _decoders(*shapes: str, widths: tuple[int, ...] = WIDTHS) -> tuple[str, ...]:
    return tuple(f"decoder {width}, {shape}" for shape in shapes for width in widths)


_ONE = _decoders("1x1", widths=(512, 1024))
_MLP = ("MLP 32 x 16, 8",)

TARGETS = (
    Target("inference, 1 token", "attached", INFERENCE, _ONE, 0.45, 1.10),
    Target("inference, 16 to 128 tokens", "attached", INFERENCE, _decoders("1x16", "1x128"), 0.65, 1.08),
    Target("inference, 8x128", "attached", INFERENCE, _decoders("8x128"), 0.95, 1.04),
    Target("training step, 1x1 and 1x16", "attached", TRAINING, _decoders("1x1", "1x16"), 0.85, 0.97),
    Target("training step, 8x128", "attached", TRAINING, _decoders("8x128"), 0.98, 1.03),
    Target("training step, 1x1, gradients in 16 bits", LOWER_GRADIENTS, TRAINING, _decoders("1x1"), 0.65),
    Target("gradient accumulation x4, 1x16", "attached", ACCUMULATION, _decoders("1x16"), 0.75, 0.95),
    Target("MLP of tiny layers, inference", "precast", INFERENCE, _MLP, 1.0),
    Target("MLP of tiny layers, training step", "precast", TRAINING, _MLP, 1.0),
)  # fmt: skip


def results(rows: Iterable[dict[str, Any]]) -> Iterator[Result]:
    """Each target in each of its cases; eager rows on the CPU count, as the targets are for it."""
    found = {
        (row["kind"], row["work"], row["case"]): row
        for row in rows
        if row["benchmark"] == "models" and row.get("device") == "cpu" and "ratio" in row
    }
    for target in TARGETS:
        for case in target.cases:
            yield Result(target, case, found.get((target.kind, target.work, case)))
