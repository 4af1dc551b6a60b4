"""compare: two recordings, side by side."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from precast.comparison.aligned_steps import (
    AlignedStep,
    StepAligner,
    StepRows,
    Tokens,
    joined_steps,
)
from precast.comparison.cause_search import CauseSearch
from precast.comparison.difference import (
    GrowthPoint,
    RunDifference,
    StepDistance,
    TokenDistance,
)
from precast.comparison.ranks import (
    RankDifference,
    drifted_replica,
    files_of,
    merged,
    pairs_of_files,
)
from precast.comparison.recording_file import RecordingReader
from precast.errors import ComparisonError

__all__ = ["compare"]

_MOST_GROWTH = 400
"""The most modules of the picture of growth."""


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
    ranks = [_compare_files(*pair, bound) for pair in pairs_of_files(files_a, files_b)]
    if len(files_a) == len(files_b) == 1:
        return ranks[0].difference
    return merged(str(a), str(b), ranks, (drifted_replica(files_a), drifted_replica(files_b)))


def _compare_files(a: Sequence[Path], b: Sequence[Path], bound: float) -> RankDifference:
    with contextlib.ExitStack() as stack:
        runs = [[RecordingReader(path) for path in files] for files in (a, b)]
        for reader in (*runs[0], *runs[1]):
            stack.callback(reader.close)
        return _compare(runs[0], runs[1], bound)


def _splits(a: Sequence[RecordingReader], b: Sequence[RecordingReader]) -> tuple[int, int]:
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
    is_same_batch = len(a) == len(b) == 1 and _first_shape(a[0].path) == _first_shape(b[0].path)
    return (1, 1) if is_same_batch else (split_a, split_b)


def _first_shape(path: Path) -> tuple[int, ...] | None:
    """Return the shape of the program's first input."""
    reader = RecordingReader(path)
    rows = (row for part in reader.parts() for row in part.rows)
    shape = next((row.shape for row in rows if row.kind == "input"), None)
    reader.close()
    return shape


def _compare(
    a: Sequence[RecordingReader], b: Sequence[RecordingReader], bound: float
) -> RankDifference:
    one, other = a[0], b[0]
    split_a, split_b = _splits(a, b)
    aligner = StepAligner(1 if split_a == split_b else max(split_a, split_b))
    search = CauseSearch(aligner)
    notes: dict[str, None] = {}
    if split_a != split_b:
        notes[
            "One run computed the parts of a batch: sums over the batch, as losses, were not compared."
        ] = None
    levels = {one.header.level, other.header.level}
    if len(levels) > 1:
        notes["One file has operations and the other modules only: modules were compared."] = None
    steps: list[StepDistance] = []
    growth: list[GrowthPoint] = []
    pairs = 0
    steps_a = joined_steps(a, notes, split_b if split_a == 1 == len(a) else 1)
    steps_b = joined_steps(b, notes, split_a if split_b == 1 == len(b) else 1)
    for step_a, step_b in _same_steps(steps_a, steps_b, notes):
        aligned = aligner.align(step_a, step_b)
        search.examine(aligned)
        steps.append(_distances(aligner, aligned, step_a.tokens, step_b.tokens))
        if search.first_bit is not None and not any(point.distance for point in growth):
            growth = _growth(aligner, aligned)
        pairs += sum(a is not None and b is not None for a, b in aligned.order)
    _check(one, other, pairs)
    notes.update(dict.fromkeys(_endings(one, other)))
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
        notes=list(notes),
    )
    return RankDifference(one.header.rank, difference, search.position)


def _same_steps(
    one: Iterator[StepRows], other: Iterator[StepRows], notes: dict[str, None]
) -> Iterator[tuple[StepRows, StepRows]]:
    """Yield the steps that both runs recorded."""
    a, b = next(one, None), next(other, None)
    skipped = False
    while a is not None and b is not None:
        if a.step == b.step:
            yield a, b
            a, b = next(one, None), next(other, None)
        elif a.step < b.step:
            skipped, a = True, next(one, None)
        else:
            skipped, b = True, next(other, None)
    if skipped or a is not None or b is not None:
        notes["The runs recorded different steps: only steps of both were compared."] = None


def _check(one: RecordingReader, other: RecordingReader, pairs: int) -> None:
    """Refuse recordings that have nothing in common."""
    if pairs:
        return
    for reader in (one, other):
        if not reader.parts_read:
            raise ComparisonError(
                f"{reader.path} has no rows: nothing ran while it was recorded. Open the recording around the steps, "
                "in the thread that runs them"
            )
    raise ComparisonError(
        f"{one.path} and {other.path} have nothing in common: other models, or no step that both recorded"
    )


def _endings(one: RecordingReader, other: RecordingReader) -> Iterator[str]:
    for reader in (one, other):
        if reader.is_cut:
            yield f"{reader.path} has no end: the program was killed, or the file is damaged. It was read up to there."
    if one.header.torch != other.header.torch:
        yield f"PyTorch {one.header.torch} against {other.header.torch}."


def _distances(
    aligner: StepAligner, step: AlignedStep, tokens_a: Tokens, tokens_b: Tokens
) -> StepDistance:
    """Return the relative distances of one step."""
    divergence = 0.0
    groups: dict[str, list[tuple[float, float]]] = {}
    last_output: tuple[int, int] | None = None
    for a, b in step.order:
        if a is None or b is None:
            continue
        row = aligner.a.rows[a]
        if row.kind == "output" and row.phase == "forward" and not row.module:
            last_output = a, b
        if row.kind == "logits":
            # 2 |sqrt(p) - sqrt(q)|^2 is the divergence of p and q up to the third order of their difference.
            positions = math.prod(row.shape[:-1])
            divergence = 2 * aligner.distance(a, b)[0] ** 2 / max(positions, 1)
        if row.kind in {"loss", "gradient", "update"}:
            groups.setdefault(row.kind, []).append(aligner.distance(a, b))
    output = None if last_output is None else aligner.relative_distance(*last_output)
    together = {kind: _combined(pairs) for kind, pairs in groups.items()}
    return StepDistance(
        step.step, output, together.get("loss"), together.get("gradient"), together.get("update"),
        _token_distance(tokens_a, tokens_b, divergence),
    )  # fmt: skip


def _token_distance(a: Tokens, b: Tokens, divergence: float) -> TokenDistance | None:
    """Return the difference of the probabilities of tokens; None without logits in both runs."""
    count = len(a[0])
    if not count or len(b[0]) != count:
        return None
    logarithms = [abs(one - other) for one, other in zip(a[1], b[1], strict=True)]
    flips = sum(one != other for one, other in zip(a[0], b[0], strict=True))
    return TokenDistance(count, flips, math.fsum(logarithms) / count, max(logarithms), divergence)


def _combined(pairs: list[tuple[float, float]]) -> float:
    distance = math.hypot(*(each for each, _ in pairs))
    norm = math.hypot(*(each for _, each in pairs))
    return distance / norm if norm else (math.inf if distance else 0.0)


def _growth(aligner: StepAligner, step: AlignedStep) -> list[GrowthPoint]:
    """Return the distances of the results of modules in forward, in the order of the program."""
    points = [
        GrowthPoint(aligner.a.rows[a].module, aligner.relative_distance(a, b))
        for a, b in step.order
        if a is not None
        and b is not None
        and (aligner.a.rows[a].kind, aligner.a.rows[a].phase) == ("output", "forward")
    ]
    return points[:: -(-len(points) // _MOST_GROWTH)] if points else []
