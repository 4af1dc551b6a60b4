"""compare: two recordings, side by side, and those of several processes rank by rank.

Invariant: a rank is named only where it differs alone: before the others, or from replicas that were equal at first.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Final, NamedTuple

from precast.comparison.aligned_steps import StepAligner, joined_steps, relative
from precast.comparison.cause_search import CauseSearch
from precast.comparison.difference import (
    Cause,
    GrowthPoint,
    RunDifference,
    StepDistance,
    TokenDistance,
)
from precast.comparison.recording_file import RecordingReader, RunStep, Tokens
from precast.errors import ComparisonError

__all__ = ["compare", "files_of"]

_MOST_GROWTH: Final = 400
"""The most modules of the picture of growth."""


class _RankDifference(NamedTuple):
    """The difference of one process of two runs, with the step and the place in it of the first one."""

    rank: int
    difference: RunDifference
    position: tuple[float, int]


def compare(
    a: str | os.PathLike[str], b: str | os.PathLike[str], *, bound: float = 0.0
) -> RunDifference:
    """Compare two recordings, and find the first cause of their difference.

    Args:
        a: the file of the first run. For a run of several processes, whose files are `a.rank0.run` and so on, `a.run`.
        b: the file of the second run, likewise.
        bound: the relative distance of results, losses and updated weights that is allowed.

    Raises:
        ComparisonError: a file cannot be read or is no recording, or the runs have nothing in common.
    """
    if not (bound >= 0 and math.isfinite(bound)):
        raise ComparisonError(f"compare(bound=...): expected a number of at least 0, got {bound!r}")
    files_a, files_b = files_of(Path(a)), files_of(Path(b))
    ranks = []
    for one, other in _pairs_of_files(files_a, files_b):
        with contextlib.ExitStack() as stack:
            ranks.append(_compare(_opened(one, stack), _opened(other, stack), bound))
    if len(files_a) == len(files_b) == 1:
        return ranks[0].difference
    return _merged(str(a), str(b), ranks, (_drifted_replica(files_a), _drifted_replica(files_b)))


def _opened(files: Sequence[Path], stack: contextlib.ExitStack) -> list[RecordingReader]:
    return [stack.enter_context(contextlib.closing(RecordingReader(path))) for path in files]


def _splits(
    a: Sequence[RecordingReader], b: Sequence[RecordingReader], notes: list[str]
) -> tuple[int, int]:
    """Return the number of parts that each run measured of a batch: equal, or 1 for the run that computed the parts."""
    split_a, split_b = a[0].header.split, b[0].header.split
    for parts, split, whole in ((a, split_b, b), (b, split_a, a)):
        if len(parts) > 1 and split != len(parts):
            raise ComparisonError(
                f"{whole[0].path} is of one process, and {parts[0].path} of {len(parts)}: record the one with "
                f"split={len(parts)} (`--split {len(parts)}`), or compare two files"
            )
    if split_a != split_b and 1 not in (split_a, split_b):
        raise ComparisonError(f"the batches were split into {split_a} parts and into {split_b}")
    sizes = _first_size(a[0].path), _first_size(b[0].path)
    if len(a) == len(b) == 1 and sizes[0] == sizes[1]:
        return 1, 1
    if split_a != split_b:
        notes.append(
            "One run computed the parts of a batch: sums over the batch, as losses, were not compared."
        )
    elif 0 not in sizes and max(sizes) % min(sizes) == 0:
        notes.append(
            f"The batches have {sizes[0]} and {sizes[1]} rows. If one run computed the parts of a batch, record the "
            f"other one with split={max(sizes) // min(sizes)}: only then are they aligned."
        )
    return split_a, split_b


def _first_size(path: Path) -> int:
    """Return the number of rows of the program's first input; 0 if there is none."""
    with contextlib.closing(RecordingReader(path)) as reader:
        rows = (row for step in reader.steps() for row in step.rows.values())
        return next((row.shape[0] for row in rows if row.kind == "input" and row.shape), 0)


def _compare(
    a: Sequence[RecordingReader], b: Sequence[RecordingReader], bound: float
) -> _RankDifference:
    one, other = a[0], b[0]
    notes: list[str] = []
    split_a, split_b = _splits(a, b, notes)
    aligner = StepAligner(1 if split_a == split_b else max(split_a, split_b))
    search = CauseSearch(aligner)
    if one.header.level != other.header.level:
        notes.append("One file has operations and the other modules only: modules were compared.")
    steps: list[StepDistance] = []
    growth: list[GrowthPoint] = []
    has_pairs = False
    steps_a = joined_steps(a, split_b if split_a == 1 == len(a) else 1)
    steps_b = joined_steps(b, split_a if split_b == 1 == len(b) else 1)
    for step_a, step_b in _same_steps(steps_a, steps_b, notes):
        pairs = aligner.align(step_a, step_b)
        search.examine(step_a.step, pairs)
        steps.append(_distances(aligner, step_a, step_b, pairs))
        if search.first_bit is not None and not any(point.distance for point in growth):
            growth = _growth(aligner, pairs)
        has_pairs |= bool(pairs)
    if not has_pairs:
        for reader in (one, other):
            if not reader.has_rows:
                raise ComparisonError(
                    f"{reader.path} has no rows: nothing ran while it was recorded. Open the recording around the "
                    "steps, in the thread that runs them"
                )
        raise ComparisonError(
            f"{one.path} and {other.path} have nothing in common: other models, or no step that both recorded"
        )
    for reader in (*a, *b):
        notes += reader.notes
        if reader.is_cut:
            notes.append(
                f"{reader.path} has no end: the program was killed, or the file is damaged. It was read up to there."
            )
    if one.header.torch != other.header.torch:
        notes.append(f"PyTorch {one.header.torch} against {other.header.torch}.")
    equal = search.first_bit is None
    amounts = [amount for each in steps for amount in (each.output, each.loss, each.weights)]
    recorded = [each for each in amounts if each is not None] or [each.distance for each in growth]
    difference = RunDifference(
        a=str(one.path),
        b=str(other.path),
        equal=equal,
        bound=bound,
        distance=max(recorded, default=0.0 if equal else math.inf),
        first_bit=search.first_bit,
        cause=search.cause or search.first_bit,
        causes=search.causes,
        growth=growth,
        steps=steps,
        notes=[*dict.fromkeys(notes)],
    )
    return _RankDifference(one.header.rank, difference, search.position)


def _same_steps(
    one: Iterator[RunStep], other: Iterator[RunStep], notes: list[str]
) -> Iterator[tuple[RunStep, RunStep]]:
    """Yield the steps that both runs recorded."""
    are_same = True
    both = heapq.merge(one, other, key=attrgetter("step"))
    for _, steps in itertools.groupby(both, attrgetter("step")):
        pair = [*steps]
        are_same &= len(pair) == 2
        if len(pair) == 2:
            yield pair[0], pair[1]
    if not are_same:
        notes.append("The runs recorded different steps: only steps of both were compared.")


def _distances(
    aligner: StepAligner, step: RunStep, other: RunStep, pairs: list[tuple[int, int]]
) -> StepDistance:
    """Return the relative distances of one step."""
    distances: dict[str, list[tuple[float, float]]] = {}
    divergence = 0.0
    for a, b in pairs:
        row = aligner.a.rows[a]
        if row.kind == "logits":
            # 2 |sqrt(p) - sqrt(q)|^2 is the divergence of p and q up to the third order of their difference.
            positions = math.prod(row.shape[:-1])
            divergence = 2 * aligner.distance(a, b)[0] ** 2 / max(positions, 1)
        elif row.kind == "output" and row.phase == "forward" and not row.module:
            distances["output"] = [aligner.distance(a, b)]  # of the last call
        elif row.kind in {"loss", "gradient", "update"}:
            distances.setdefault(row.kind, []).append(aligner.distance(a, b))
    output, loss, gradients, weights = (
        relative(distances[kind]) if kind in distances else None
        for kind in ("output", "loss", "gradient", "update")
    )
    tokens = _token_distance(step.tokens, other.tokens, divergence)
    return StepDistance(step.step, output, loss, gradients, weights, tokens)


def _token_distance(a: Tokens, b: Tokens, divergence: float) -> TokenDistance | None:
    """Return the difference of the probabilities of tokens; None without logits in both runs."""
    count = len(a[0])
    if not count or len(b[0]) != count:
        return None
    logarithms = [abs(one - other) for one, other in zip(a[1], b[1], strict=True)]
    flips = sum(one != other for one, other in zip(a[0], b[0], strict=True))
    return TokenDistance(count, flips, math.fsum(logarithms) / count, max(logarithms), divergence)


def _growth(aligner: StepAligner, pairs: list[tuple[int, int]]) -> list[GrowthPoint]:
    """Return the distances of the results of modules in forward, in the order of the program."""
    outputs = ((aligner.a.rows[a], a, b) for a, b in pairs)
    points = [
        GrowthPoint(row.module, aligner.relative_distance(a, b))
        for row, a, b in outputs
        if (row.kind, row.phase) == ("output", "forward")
    ]
    return points[:: max(1, -(-len(points) // _MOST_GROWTH))]


def files_of(path: Path) -> list[Path]:
    """Return the files of a run: the path itself, or those of its processes, by rank."""
    pattern = f"{path.stem}.rank*{path.suffix}"
    ranks = [(each.stem.rpartition(".rank")[2], each) for each in path.parent.glob(pattern)]
    files = [each for _, each in sorted((int(n), each) for n, each in ranks if n.isdecimal())]
    return [path] if path.exists() or not files else files


def _pairs_of_files(
    a: Sequence[Path], b: Sequence[Path]
) -> list[tuple[Sequence[Path], Sequence[Path]]]:
    """Return the files that are compared: rank by rank, or all ranks of one run with the other run's only one."""
    if len(a) == len(b):
        return [([one], [other]) for one, other in zip(a, b, strict=True)]
    if 1 in (len(a), len(b)):
        return [(a, b)]
    raise ComparisonError(
        f"{len(a)} files of {a[0]} and {len(b)} of {b[0]}: expected runs of as many processes, or one of one. "
        f"Compare two of them, as in `precast compare {a[0]} {b[0]}`"
    )


def _merged(
    a: str, b: str, ranks: Sequence[_RankDifference], drifts: tuple[Cause | None, Cause | None]
) -> RunDifference:
    """Return the difference of all ranks: that of the rank which differs first, named if it is alone.

    Args:
        a: the name of the first run.
        b: the name of the second run.
        ranks: the difference of each rank.
        drifts: the replica that has drifted from the others in each run.
    """
    first = min(ranks, key=lambda each: each.position)
    is_alone = len(ranks) > 1 and sum(each.position == first.position for each in ranks) == 1
    differences = [each.difference for each in ranks]
    cause = first.difference.cause
    if cause is not None and is_alone:
        text = f"rank {first.rank} differs before the others: {cause.kind}: {cause.difference}"
        cause = replace(cause, kind="rank", difference=text, rank=first.rank)
    elif drifts[0] is None and drifts[1] is not None:
        cause = drifts[1]
    notes = [note for each in differences for note in each.notes]
    notes += [
        f"In {name}: {each.difference}" for name, each in zip((a, b), drifts, strict=True) if each
    ]
    return replace(
        first.difference,
        a=a,
        b=b,
        equal=all(each.equal for each in differences),
        distance=max(each.distance for each in differences),
        cause=cause,
        notes=[*dict.fromkeys(notes)],
    )


def _drifted_replica(files: Sequence[Path]) -> Cause | None:
    """Return the first parameter of one rank that is no longer that of the others, although it was at first."""
    replicated: dict[str, bool] = {}
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(contextlib.closing(RecordingReader(path))) for path in files]
        for steps in zip(*(reader.steps() for reader in readers), strict=False):
            of_ranks = [_weights(step) for step in steps]
            for name in sorted(set.intersection(*map(set, of_ranks))):
                counts = Counter(each[name] for each in of_ranks)
                if not replicated.setdefault(name, len(counts) == 1) or len(counts) == 1:
                    continue
                usual, _ = counts.most_common(1)[0]
                rank = max(n for n, each in enumerate(of_ranks) if each[name] != usual)
                text = f"the replica of {name} in rank {rank} has drifted from those of the other ranks"
                module = name.rpartition(".")[0]
                return Cause(steps[0].step, module, name, "", "rank", text, rank)
    return None


def _weights(step: RunStep) -> dict[str, tuple[object, ...]]:
    """Return the bits of the weights that a step read first, else of those that it updated."""
    weights: dict[str, tuple[object, ...]] = {}
    for row in step.rows.values():
        if row.kind in {"weight", "update"}:
            weights.setdefault(row.name, (row.bits, row.dtype))
    return weights
