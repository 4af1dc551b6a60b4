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
from itertools import chain
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from precast.comparison.recording_file import Part, RecordingReader, Row, RowInput
from precast.comparison.sketches import SIZE

__all__ = [
    "AlignedStep",
    "RunRows",
    "StepAligner",
    "StepRows",
    "Tokens",
    "base_name",
    "joined_steps",
    "steps_of",
]

_Token = tuple[str, ...]
Tokens = tuple[list[float], list[float]]
"""The likeliest tokens and the logarithms of probabilities, at all positions of logits."""
_STATE: Final = frozenset({"weight", "buffer", "gradient", "update"})
_SIZES: Final = frozenset({"size", "N", "batch_size"})
"""Arguments that depend on the size of the batch."""


class StepRows(NamedTuple):
    """The rows of one step of a recording.

    Attributes:
        step: the number of the step.
        first: the number of the first row.
        rows: the rows.
        measurements: their measurements.
        tokens: the probabilities of tokens; empty lists without logits.
        others: the steps that computed the other parts of the batch.
    """

    step: int
    first: int
    rows: list[Row]
    measurements: Tensor
    tokens: Tokens
    others: tuple[StepRows, ...] = ()


def joined_steps(
    readers: Sequence[RecordingReader], notes: dict[str, None], split: int
) -> Iterator[StepRows]:
    """Yield the steps of a run; steps that computed the parts of one batch are one.

    Args:
        readers: the recording; several of processes that computed a part each.
        notes: sentences on what was not recorded are added here.
        split: the number of consecutive steps of one recording that computed the parts.
    """
    runs = [steps_of(reader, notes) for reader in readers]
    for number, (step, *others) in enumerate(zip(*runs, *runs * (split - 1), strict=False)):
        likeliest, logs = (
            list(chain(*(each.tokens[i] for each in (step, *others)))) for i in (0, 1)
        )
        joined = step._replace(tokens=(likeliest, logs), others=tuple(others))
        yield joined if split == 1 else joined._replace(step=number)


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
    tokens: Tokens = [], []
    for part in parts:
        rows += [Row(*row[:-2], row.measurement + offset, row.parts) for row in part.rows]
        offset += len(part.measurements)
        for likeliest, logs in part.tokens.values():
            tokens[0].extend(likeliest)
            tokens[1].extend(logs)
    measurements = torch.cat([part.measurements for part in parts])
    return StepRows(parts[0].step, parts[0].first, rows, measurements, tokens)


class RunRows:
    """All rows of one run that were read so far, by their numbers."""

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}
        self.bits: dict[int, tuple[Any, str]] = {}
        """The fingerprint and the dtype of each row."""
        self.steps: dict[int, int] = {}
        self.measurements: dict[int, Tensor] = {}
        """The measurements of rows of the latest step, as matrices: one row, or one for each part of the batch."""
        self._parts: dict[int, Tensor] = {}

    def add(self, step: StepRows) -> list[int]:
        """Add a step; return the numbers of its rows. Measurements of earlier steps are dropped."""
        self.measurements.clear()
        self._parts.clear()
        fingerprints = _fingerprints(step.measurements)
        numbers = []
        for number, row in enumerate(step.rows, step.first):
            position, end = row.measurement, row.measurement + 1
            self.rows[number] = row
            self.bits[number] = fingerprints[position], row.dtype
            self.steps[number] = step.step
            self.measurements[number] = step.measurements[position:end]
            if row.parts:
                self._parts[number] = step.measurements[end : end + row.parts]
            numbers.append(number)
        return numbers

    def join(self, step: StepRows) -> None:
        """Prepare the rows of a step for a comparison with other batches: parts, and nothing that names sizes."""
        for number, row in enumerate(step.rows, step.first):
            inputs = (tuple(n for n in each.rows if n in self.rows) for each in row.inputs)
            arguments = "; ".join(
                each for each in row.arguments.split("; ") if each.partition("=")[0] not in _SIZES
            )
            self.rows[number] = row._replace(
                inputs=tuple(map(RowInput, inputs)), arguments=arguments
            )
        if not step.others:
            return
        parts = [
            dict(
                zip(
                    _keys(dict(enumerate(each.rows)), range(len(each.rows))), each.rows, strict=True
                )
            )
            for each in step.others
        ]
        own = range(step.first, step.first + len(step.rows))
        for number, key in zip(own, _keys(self.rows, own), strict=True):
            rows = [
                (part.measurements, each[key].measurement)
                for part, each in zip(step.others, parts, strict=True)
                if key in each
            ]
            if len(rows) == len(parts):
                others = [matrix[position : position + 1] for matrix, position in rows]
                self._parts[number] = torch.cat([self.measurements[number], *others])

    def has_parts(self, number: int) -> bool:
        """Return True if the parts of a row of the latest step were measured."""
        return number in self._parts

    def compare_by_parts(self, number: int, shape: tuple[int, ...]) -> None:
        """Let the parts of a row stand for it, in the shape of the whole batch."""
        parts = self._parts[number]
        self.measurements[number] = parts
        self.bits[number] = tuple(_fingerprints(parts)), self.bits[number][1]
        self.rows[number] = self.rows[number]._replace(shape=shape)


def _fingerprints(measurements: Tensor) -> list[int]:
    bits: list[int] = measurements[:, 0].contiguous().view(torch.int64).tolist()
    return bits


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

    def __init__(self, split: int = 1) -> None:
        self.a, self.b = RunRows(), RunRows()
        self._split = split
        self._of_batch: set[int] = set()
        """Rows of the first run that depend on the batch, if one run computes it in parts."""
        self._of_other_batch: set[int] = set()
        """Those that have no parts, as a sum over the batch, and everything that is computed from them."""
        self.partner_a: dict[int, int] = {}
        """Maps a row of the first run to that of the second one."""
        self.partner_b: dict[int, int] = {}
        self._orders: dict[
            tuple[tuple[_Token, ...], tuple[_Token, ...]], list[tuple[int, int]]
        ] = {}

    def align(self, one: StepRows, other: StepRows) -> AlignedStep:
        """Align one step of both runs."""
        numbers = self.a.add(one), self.b.add(other)
        if self._split > 1:
            self.a.join(one)
            self.b.join(other)
        pairs = [*self._by_name(*numbers), *self._by_order(*numbers)]
        if self._split > 1:
            pairs = [*self._comparable(numbers[0], dict(pairs))]
        self.partner_a |= dict(pairs)
        self.partner_b |= {b: a for a, b in pairs}
        return AlignedStep(one.step, [*_merged(*numbers, dict(pairs))])

    def relative_distance(self, a: int, b: int) -> float:
        """Return the estimated distance of two rows of the latest step, relative to the larger of their norms."""
        distance, norm = self.distance(a, b)
        return distance / norm if norm else (math.inf if distance else 0.0)

    def distance(self, a: int, b: int) -> tuple[float, float]:
        """Return the estimated distance of two rows of the latest step, and the larger of their norms."""
        one, other = self.a.measurements[a], self.b.measurements[b]
        if self.a.bits[a] == self.b.bits[b]:
            return 0.0, math.sqrt(sum(one[:, 4].tolist()))
        if not torch.equal(one[:, 5], other[:, 5]):  # infinite or NaN in one run only
            return math.inf, 1.0
        distance = float(torch.linalg.vector_norm(one[:, -SIZE:] - other[:, -SIZE:]))
        return distance, math.sqrt(max(sum(one[:, 4].tolist()), sum(other[:, 4].tolist())))

    def _comparable(self, numbers: list[int], partner: dict[int, int]) -> Iterator[tuple[int, int]]:
        """Yield the pairs that can be compared although one run computes a batch in parts."""
        for a in numbers:
            row, b = self.a.rows[a], partner.get(a)
            read = {number for each in row.inputs for number in each.rows}
            is_lost = not self._of_other_batch.isdisjoint(read)
            is_of_batch = is_lost or not self._of_batch.isdisjoint(read)
            if b is not None and row.kind in _STATE:
                yield a, b
                continue
            if b is not None and not is_lost and self._take_parts(a, b):
                is_of_batch = True
                yield a, b
            elif b is not None and not is_of_batch and row.shape == self.b.rows[b].shape:
                yield a, b
            elif b is not None and is_of_batch:
                is_lost = True
            if is_of_batch:
                self._of_batch.add(a)
            if is_lost:
                self._of_other_batch.add(a)

    def _take_parts(self, a: int, b: int) -> bool:
        """Compare two rows by their parts; return False if they are not a batch and its parts."""
        one, other = sorted((self.a.rows[a].shape, self.b.rows[b].shape))
        if not one or (one[0] * self._split, *one[1:]) != other:
            return False
        if not (self.a.has_parts(a) and self.b.has_parts(b)):
            return False
        self.a.compare_by_parts(a, other)
        self.b.compare_by_parts(b, other)
        return True

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
            tokens = tuple(self._tokens(self.a, chosen_a)), tuple(self._tokens(self.b, chosen_b))
            if tokens not in self._orders:
                self._orders[tokens] = [*_matches(*tokens)]
            yield from ((chosen_a[i], chosen_b[j]) for i, j in self._orders[tokens])

    def _tokens(self, run: RunRows, numbers: list[int]) -> Iterator[_Token]:
        for row in map(run.rows.__getitem__, numbers):
            shape = str(row.shape) if self._split == 1 else ""
            yield row.module, base_name(row.name), str(row.result), shape


def base_name(name: str) -> str:
    """Return an operation without its overload and without the underscore of operations in place."""
    base = name.partition(".")[0]
    return base.rstrip("_") or base


def _is_operation(row: Row, phase: str) -> bool:
    return row.kind == "operation" and row.phase == phase


def _keys(rows: dict[int, Row], numbers: Iterable[int]) -> Iterator[_Token]:
    counts: Counter[_Token] = Counter()
    for number in numbers:
        row = rows[number]
        if row.kind in _STATE:
            key: _Token = row.kind, row.name
        elif row.kind == "output":
            key = row.kind, row.phase, row.module, str(row.result)
        elif row.kind == "operation":
            name, form = base_name(row.name), f"{row.result} {row.shape}"
            key = row.kind, row.phase, row.module, name, form
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
