"""The rows of two recordings side by side: which row of one run is which row of the other.

Invariants:

- weights, gradients and updates are aligned by name, results of modules by path and call, operations by their order in
  a phase: an operation that only one run has shifts nothing;
- names are compared without overloads and without the underscore of operations in place, which versions change.
"""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from precast.diagnostics.comparison.recording_file import Part, RecordingReader, Row
from precast.diagnostics.comparison.sketches import SIZE

__all__ = ["AlignedStep", "RunRows", "StepAligner", "StepRows", "base_name", "steps_of"]

_Token = tuple[str, ...]
_STATE: Final = frozenset({"weight", "buffer", "gradient", "update"})


class StepRows(NamedTuple):
    """The rows of one step of a recording, with their measurements."""

    step: int
    first: int
    rows: list[Row]
    measurements: Tensor


def steps_of(reader: RecordingReader, notes: dict[str, None]) -> Iterator[StepRows]:
    """Yield the steps of a recording, each whole; sentences on what was not recorded are added to `notes`."""
    parts: list[Part] = []
    for part in reader.parts():
        notes.update(dict.fromkeys(part.notes))
        if parts and parts[0].step != part.step:
            yield _joined(parts)
            parts = []
        parts.append(part)
    if parts:
        yield _joined(parts)


def _joined(parts: list[Part]) -> StepRows:
    rows, offset = [], 0
    for part in parts:
        rows += [Row(*row[:-1], row.measurement + offset) for row in part.rows]
        offset += len(part.measurements)
    return StepRows(
        parts[0].step, parts[0].first, rows, torch.cat([part.measurements for part in parts])
    )


class RunRows:
    """All rows of one run that were read so far, by their numbers."""

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}
        self.bits: dict[int, tuple[int, str]] = {}
        """The fingerprint and the dtype of each row."""
        self.steps: dict[int, int] = {}
        self._measurements: dict[int, Tensor] = {}

    def add(self, step: StepRows) -> list[int]:
        """Add a step; return the numbers of its rows. Measurements of earlier steps are dropped."""
        self._measurements.clear()
        fingerprints = step.measurements[:, 0].contiguous().view(torch.int64).tolist()
        numbers = []
        for number, row in enumerate(step.rows, step.first):
            self.rows[number] = row
            self.bits[number] = fingerprints[row.measurement], row.dtype
            self.steps[number] = step.step
            self._measurements[number] = step.measurements[row.measurement]
            numbers.append(number)
        return numbers

    def measurement(self, number: int) -> Tensor:
        """Return the measurement of a row of the latest step."""
        return self._measurements[number]


@dataclass(frozen=True)
class AlignedStep:
    """One step of two runs.

    Attributes:
        step: its number.
        order: pairs of rows of the two runs, in the order of the program; None where a run has no such row.
    """

    step: int
    order: list[tuple[int | None, int | None]]


class StepAligner:
    """Aligns the steps of two runs, and measures the distance of two rows."""

    def __init__(self) -> None:
        self.a, self.b = RunRows(), RunRows()
        self.partner_a: dict[int, int] = {}
        """Maps a row of the first run to that of the second one."""
        self.partner_b: dict[int, int] = {}
        self._orders: dict[
            tuple[tuple[_Token, ...], tuple[_Token, ...]], list[tuple[int, int]]
        ] = {}

    def align(self, one: StepRows, other: StepRows) -> AlignedStep:
        """Align one step of both runs."""
        numbers = self.a.add(one), self.b.add(other)
        pairs = [*self._by_name(*numbers), *self._by_order(*numbers)]
        self.partner_a |= dict(pairs)
        self.partner_b |= {b: a for a, b in pairs}
        return AlignedStep(one.step, [*_merged(*numbers, dict(pairs))])

    def relative_distance(self, a: int, b: int) -> float:
        """Return the estimated distance of two rows of the latest step, relative to the larger of their norms."""
        distance, norm = self.distance(a, b)
        return distance / norm if norm else (math.inf if distance else 0.0)

    def distance(self, a: int, b: int) -> tuple[float, float]:
        """Return the estimated distance of two rows of the latest step, and the larger of their norms."""
        one, other = self.a.measurement(a), self.b.measurement(b)
        if float(one[5]) != float(other[5]):  # infinite or NaN in one run only
            return math.inf, 1.0
        distance = float(torch.linalg.vector_norm(one[-SIZE:] - other[-SIZE:]))
        return distance, math.sqrt(max(float(one[4]), float(other[4])))

    def _by_name(self, numbers_a: list[int], numbers_b: list[int]) -> Iterator[tuple[int, int]]:
        """Pair everything but operations by kind, name and the number of the call."""
        keys_b = dict(zip(_keys(self.b.rows, numbers_b), numbers_b, strict=True))
        for key, a in zip(_keys(self.a.rows, numbers_a), numbers_a, strict=True):
            if key[0] != "operation" and key in keys_b:
                yield a, keys_b[key]

    def _by_order(self, numbers_a: list[int], numbers_b: list[int]) -> Iterator[tuple[int, int]]:
        """Pair the operations of each phase by their order."""
        for phase in ("forward", "backward", "other"):
            chosen_a = [n for n in numbers_a if _is_operation(self.a.rows[n], phase)]
            chosen_b = [n for n in numbers_b if _is_operation(self.b.rows[n], phase)]
            tokens = (
                tuple(_token(self.a.rows[n]) for n in chosen_a),
                tuple(_token(self.b.rows[n]) for n in chosen_b),
            )
            if tokens not in self._orders:
                self._orders[tokens] = [*_matches(*tokens)]
            yield from ((chosen_a[i], chosen_b[j]) for i, j in self._orders[tokens])


def base_name(name: str) -> str:
    """Return an operation without its overload and without the underscore of operations in place."""
    base = name.partition(".")[0]
    return base.rstrip("_") or base


def _is_operation(row: Row, phase: str) -> bool:
    return row.kind == "operation" and row.phase == phase


def _token(row: Row) -> _Token:
    return row.module, base_name(row.name), str(row.result), str(row.shape)


def _keys(rows: dict[int, Row], numbers: Iterable[int]) -> Iterator[_Token]:
    counts: Counter[_Token] = Counter()
    for number in numbers:
        row = rows[number]
        if row.kind in _STATE:
            key: _Token = row.kind, row.name
        elif row.kind == "output":
            key = row.kind, row.phase, row.module, str(row.result)
        else:
            key = row.kind, row.phase, row.module
        counts[key] += 1
        yield *key, str(counts[key])


def _matches(a: Sequence[_Token], b: Sequence[_Token]) -> Iterator[tuple[int, int]]:
    """Yield the positions of equal tokens, such that both sequences keep their order.

    Where the sequences differ in shapes only, as with another batch, these tokens are paired too.
    """
    start = 0
    while start < min(len(a), len(b)) and a[start] == b[start]:
        start += 1
    end = 0
    while end < min(len(a), len(b)) - start and a[-1 - end] == b[-1 - end]:
        end += 1
    middle = a[start : len(a) - end], b[start : len(b) - end]
    matcher = difflib.SequenceMatcher(None, *middle, autojunk=False)
    blocks = [(start + i, start + j, n) for i, j, n in matcher.get_matching_blocks()]
    position_a = position_b = 0
    for i, j, size in [(0, 0, start), *blocks, (len(a) - end, len(b) - end, end)]:
        gap_a, gap_b = a[position_a:i], b[position_b:j]
        if [token[:-1] for token in gap_a] == [token[:-1] for token in gap_b]:
            yield from ((position_a + k, position_b + k) for k in range(len(gap_a)))
        yield from ((i + k, j + k) for k in range(size))
        position_a, position_b = i + size, j + size


def _merged(
    numbers_a: list[int], numbers_b: list[int], partner: dict[int, int]
) -> Iterator[tuple[int | None, int | None]]:
    """Yield all rows in the order of the first run, with those of the second run alone before the next pair."""
    paired = set(partner.values())
    alone, position = [n for n in numbers_b if n not in paired], 0
    for a in numbers_a:
        b = partner.get(a)
        while b is not None and position < len(alone) and alone[position] < b:
            yield None, alone[position]
            position += 1
        yield a, b
    yield from ((None, b) for b in alone[position:])
