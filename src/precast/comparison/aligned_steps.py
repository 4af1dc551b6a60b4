"""The rows of two recordings side by side: which row of one run is which row of the other.

Invariants:

- weights, gradients and updates are aligned by name, results of modules by path and call, operations by their order in
  a phase: an operation that only one run has shifts nothing;
- names are compared without overloads and without the underscore of operations in place, which versions change.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from itertools import chain
from typing import Final

import torch
from torch import Tensor

from precast.comparison.recording_file import RecordingReader, Row, RowInput, RunStep, fingerprints
from precast.comparison.sketches import SIZE
from precast.errors import ComparisonError

__all__ = ["RunRows", "StepAligner", "base_name", "joined_steps", "relative"]

_Token = tuple[str, ...]
_STATE: Final = frozenset({"weight", "buffer", "gradient", "update"})
_SIZES: Final = frozenset({"size", "N", "batch_size"})
"""Arguments that depend on the size of the batch."""


def joined_steps(readers: Sequence[RecordingReader], split: int) -> Iterator[RunStep]:
    """Yield the steps of a run; those that computed the parts of one batch are one.

    The parts are those of several processes. If one recording has `split` parts, they are steps without gradients, or
    passes of a step that accumulates gradients.
    """
    runs: list[Iterator[RunStep]] = [reader.steps() for reader in readers]
    if split > 1:
        runs = [chain.from_iterable(_passes(step, readers[0], split) for step in runs[0])] * split
    for number, (step, *others) in enumerate(zip(*runs, strict=False)):
        for each in others:
            step.tokens[0].extend(each.tokens[0])
            step.tokens[1].extend(each.tokens[1])
        keyed = [_keys(each.rows) for each in others]
        for key, n in _keys(step.rows).items() if others else ():
            if all(key in each for each in keyed):
                pairs = zip(others, keyed, strict=True)
                parts = (part.measurements[each[key]][:1] for part, each in pairs)
                own = step.measurements[n][:1]
                step.measurements[n] = torch.cat([own, own, *parts])
        if split > 1:  # the optimizer steps after the last part
            rows = {
                n: each for part in others for n, each in part.rows.items() if each.kind in _STATE
            }
            measurements = {
                n: part.measurements[n] for part in others for n in rows.keys() & part.rows
            }
            step.rows.update(rows)
            step.measurements.update(measurements)
        yield step if split == 1 else step._replace(step=number)


def _passes(step: RunStep, reader: RecordingReader, split: int) -> Iterator[RunStep]:
    """Yield each forward pass of a step with its backward pass. Those of one step accumulate gradients."""
    passes: list[dict[int, Row]] = [{}]
    is_over = False
    for number, row in step.rows.items():
        if is_over and (row.phase == "forward" or row.kind == "input"):
            passes.append({})
            is_over = False
        passes[-1][number] = row
        is_over |= row.phase == "backward" and row.kind not in _STATE
    if len(passes) > 1 and all(row.phase != "forward" for row in passes[-1].values()):
        passes[-2] |= passes.pop()  # the clipping of gradients reads tensors, too
    if len(passes) not in (1, split):
        raise ComparisonError(
            f"step {step.step} of {reader.path} has {len(passes)} backward passes, and the batches of the other run "
            f"were measured in {split} parts: record that one with split={len(passes)}"
        )
    for rows in passes:
        measurements = {number: step.measurements[number] for number in rows}
        tokens = step.tokens if rows is passes[0] else ([], [])
        yield RunStep(step.step, rows, measurements, tokens)


class RunRows:
    """All rows of one run that were read so far, and the measurements of the latest step, by the numbers of rows."""

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}
        self.measurements: dict[int, Tensor] = {}
        self.parts: dict[int, Tensor] = {}
        """The measurements of the parts of a batch."""

    def add(self, step: RunStep) -> None:
        """Add a step. Measurements of earlier steps are dropped."""
        self.rows |= step.rows
        self.parts = {n: each[1:] for n, each in step.measurements.items() if len(each) > 1}
        own = {n: step.measurements[n][:1] for n in self.parts}
        self.measurements = {**step.measurements, **own}

    def identities(self, read: RowInput) -> list[tuple[tuple[int, ...], str]]:
        """Return bits and dtype of the rows that wrote a tensor; those of steps that were not compared are left out."""
        rows = (self.rows[number] for number in read.rows if number in self.rows)
        return [(row.bits, row.dtype) for row in rows]

    def compare_by_parts(self, number: int, shape: tuple[int, ...]) -> None:
        """Let the parts of a row stand for it, in the shape of the whole batch."""
        self.measurements[number] = self.parts[number]
        bits = fingerprints(self.parts[number])
        self.rows[number] = self.rows[number]._replace(shape=shape, bits=bits)


class StepAligner:
    """Aligns the steps of two runs, one of which may compute `split` parts of a batch, and measures distances."""

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
        self._orders: dict[tuple[tuple[_Token, ...], ...], list[tuple[int, int]]] = {}

    def align(self, one: RunStep, other: RunStep) -> list[tuple[int, int]]:
        """Align one step of both runs; return the pairs of rows in the order of the first run."""
        if self._split > 1:
            one, other = map(_without_sizes, (one, other))
        self.a.add(one)
        self.b.add(other)
        pairs = sorted([*self._by_name(one, other), *self._by_order(one, other)])
        if self._split > 1:
            pairs = [*self._comparable(one, dict(pairs))]
        self.partner_a |= dict(pairs)
        self.partner_b |= {b: a for a, b in pairs}
        return pairs

    def relative_distance(self, a: int, b: int) -> float:
        """Return the estimated distance of two rows of the latest step, relative to the larger of their norms."""
        return relative([self.distance(a, b)])

    def distance(self, a: int, b: int) -> tuple[float, float]:
        """Return the estimated distance of two rows of the latest step, and the larger of their norms."""
        one, other = self.a.measurements[a], self.b.measurements[b]
        norm = math.sqrt(max(sum(one[:, 4].tolist()), sum(other[:, 4].tolist())))
        if self.is_equal(a, b):
            return 0.0, norm
        if not torch.equal(one[:, 5], other[:, 5]):  # infinite or NaN in one run only
            return math.inf, 1.0
        return float(torch.linalg.vector_norm(one[:, -SIZE:] - other[:, -SIZE:])), norm

    def is_equal(self, a: int, b: int) -> bool:
        """Return True if two rows have the same bits and dtype."""
        one, other = self.a.rows[a], self.b.rows[b]
        return one.bits == other.bits and one.dtype == other.dtype

    def _comparable(self, step: RunStep, partner: dict[int, int]) -> Iterator[tuple[int, int]]:
        """Yield the pairs that can be compared although one run computes a batch in parts."""
        for a in step.rows:
            row, b = self.a.rows[a], partner.get(a)
            read = {number for each in row.inputs for number in each.rows}
            is_lost = row.kind == "loss" or not self._of_other_batch.isdisjoint(read)
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
        is_split = bool(one) and (one[0] * self._split, *one[1:]) == other
        if not is_split or a not in self.a.parts or b not in self.b.parts:
            return False
        self.a.compare_by_parts(a, other)
        self.b.compare_by_parts(b, other)
        return True

    def _by_name(self, one: RunStep, other: RunStep) -> Iterator[tuple[int, int]]:
        """Pair everything but operations by kind, name and the number of the call."""
        keys_b = _keys(other.rows)
        for key, a in _keys(one.rows).items():
            if key[0] != "operation" and key in keys_b:
                yield a, keys_b[key]

    def _by_order(self, one: RunStep, other: RunStep) -> Iterator[tuple[int, int]]:
        """Pair the operations of each phase by their order."""
        for phase in ("forward", "backward", "other"):
            a, b = (
                [n for n, row in each.rows.items() if (row.kind, row.phase) == ("operation", phase)]
                for each in (one, other)
            )
            tokens = (
                tuple(self._token(one.rows[n]) for n in a),
                tuple(self._token(other.rows[n]) for n in b),
            )
            if tokens not in self._orders:
                self._orders[tokens] = [*_matches(*tokens)]
            yield from ((a[i], b[j]) for i, j in self._orders[tokens])

    def _token(self, row: Row) -> _Token:
        shape = str(row.shape) if self._split == 1 else ""
        return row.module, base_name(row.name), str(row.result), shape


def _without_sizes(step: RunStep) -> RunStep:
    """Return a step whose rows name no view and no argument that depends on the size of the batch."""
    rows = {}
    for number, row in step.rows.items():
        arguments = (a for a in row.arguments.split("; ") if a.partition("=")[0] not in _SIZES)
        inputs = tuple(RowInput(each.rows) for each in row.inputs)
        rows[number] = row._replace(inputs=inputs, arguments="; ".join(arguments))
    return step._replace(rows=rows)


def relative(pairs: Iterable[tuple[float, float]]) -> float:
    """Return the distance of several pairs of tensors together, relative to the norm of all."""
    distances, norms = zip(*pairs, strict=True)
    distance, norm = math.hypot(*distances), math.hypot(*norms)
    return distance / norm if norm else (math.inf if distance else 0.0)


def base_name(name: str) -> str:
    """Return an operation without its overload and without the underscore of operations in place."""
    base = name.partition(".")[0]
    return base.rstrip("_") or base


def _keys(rows: dict[int, Row]) -> dict[_Token, int]:
    """Return the numbers of rows by kind, name and the number of the call."""
    counts: Counter[_Token] = Counter()
    numbers = {}
    for number, row in rows.items():
        key: _Token = row.kind, row.phase, row.module
        if row.kind in _STATE:
            key = row.kind, row.name
        elif row.kind == "output":
            key = (*key, str(row.result))
        elif row.kind == "operation":
            key = (*key, base_name(row.name), f"{row.result} {row.shape}")
        counts[key] += 1
        numbers[*key, str(counts[key])] = number
    return numbers


def _matches(a: Sequence[_Token], b: Sequence[_Token]) -> Iterator[tuple[int, int]]:
    """Yield the positions of equal tokens, such that both sequences keep their order.

    Where the sequences differ in shapes only, as with another batch, these tokens are paired too.
    """
    start = _common(a, b)
    end = _common(a[start:][::-1], b[start:][::-1])
    middle_a, middle_b = a[start : len(a) - end], b[start : len(b) - end]
    pairs = [(0, start, 0, start), (len(a) - end, len(a), len(b) - end, len(b))]
    matcher = SequenceMatcher(None, middle_a, middle_b, autojunk=False)
    for name, i, i_end, j, j_end in matcher.get_opcodes():
        forms = [[token[:-1] for token in each] for each in (middle_a[i:i_end], middle_b[j:j_end])]
        if name == "equal" or forms[0] == forms[1]:
            pairs.append((start + i, start + i_end, start + j, start + j_end))
    for i, i_end, j, j_end in pairs:
        yield from zip(range(i, i_end), range(j, j_end), strict=True)


def _common(a: Sequence[_Token], b: Sequence[_Token]) -> int:
    """Return the number of equal tokens at the beginning of two sequences."""
    differing = (i for i, (one, other) in enumerate(zip(a, b, strict=False)) if one != other)
    return next(differing, min(len(a), len(b)))
