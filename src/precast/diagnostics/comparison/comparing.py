"""compare: two recordings, side by side."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

from precast.diagnostics.comparison.aligned_steps import (
    AlignedStep,
    StepAligner,
    StepRows,
    steps_of,
)
from precast.diagnostics.comparison.cause_search import CauseSearch
from precast.diagnostics.comparison.difference import GrowthPoint, RunDifference, StepDistance
from precast.diagnostics.comparison.ranks import (
    RankDifference,
    check_ranks,
    drifted_replica,
    files_of,
    merged,
)
from precast.diagnostics.comparison.recording_file import RecordingReader
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
    check_ranks(files_a, files_b)
    ranks = [_compare_files(*pair, bound) for pair in zip(files_a, files_b, strict=True)]
    if len(ranks) == 1:
        return ranks[0].difference
    return merged(str(a), str(b), ranks, (drifted_replica(files_a), drifted_replica(files_b)))


def _compare_files(a: Path, b: Path, bound: float) -> RankDifference:
    with contextlib.ExitStack() as stack:
        readers = [RecordingReader(path) for path in (a, b)]
        for reader in readers:
            stack.callback(reader.close)
        return _compare(readers[0], readers[1], bound)


def _compare(one: RecordingReader, other: RecordingReader, bound: float) -> RankDifference:
    aligner = StepAligner()
    search = CauseSearch(aligner)
    notes: dict[str, None] = {}
    levels = {one.header.level, other.header.level}
    if len(levels) > 1:
        notes["One file has operations and the other modules only: modules were compared."] = None
    steps: list[StepDistance] = []
    growth: list[GrowthPoint] = []
    pairs = 0
    for step_a, step_b in _same_steps(steps_of(one, notes), steps_of(other, notes), notes):
        aligned = aligner.align(step_a, step_b)
        search.examine(aligned)
        steps.append(_distances(aligner, aligned))
        if not growth and search.first_bit is not None:
            growth = _growth(aligner, aligned)
        pairs += sum(a is not None and b is not None for a, b in aligned.order)
    _check(one, other, pairs)
    notes.update(dict.fromkeys(_endings(one, other)))
    amounts = [amount for each in steps for amount in (each.output, each.loss, each.weights)]
    difference = RunDifference(
        a=str(one.path),
        b=str(other.path),
        equal=search.first_bit is None,
        bound=bound,
        distance=max((each for each in amounts if each is not None), default=0.0),
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


def _distances(aligner: StepAligner, step: AlignedStep) -> StepDistance:
    """Return the relative distances of one step."""
    groups: dict[str, list[tuple[float, float]]] = {}
    last_output: tuple[int, int] | None = None
    for a, b in step.order:
        if a is None or b is None:
            continue
        row = aligner.a.rows[a]
        if row.kind == "output" and row.phase == "forward" and not row.module:
            last_output = a, b
        if row.kind in {"loss", "gradient", "update"}:
            equal = aligner.a.bits[a] == aligner.b.bits[b]
            distance, norm = aligner.distance(a, b)
            groups.setdefault(row.kind, []).append((0.0 if equal else distance, norm))
    output = None if last_output is None else _relative(aligner, *last_output)
    together = {kind: _combined(pairs) for kind, pairs in groups.items()}
    return StepDistance(
        step.step, output, together.get("loss"), together.get("gradient"), together.get("update")
    )


def _combined(pairs: list[tuple[float, float]]) -> float:
    distance = math.hypot(*(each for each, _ in pairs))
    norm = math.hypot(*(each for _, each in pairs))
    return distance / norm if norm else (math.inf if distance else 0.0)


def _relative(aligner: StepAligner, a: int, b: int) -> float:
    equal = aligner.a.bits[a] == aligner.b.bits[b]
    return 0.0 if equal else aligner.relative_distance(a, b)


def _growth(aligner: StepAligner, step: AlignedStep) -> list[GrowthPoint]:
    """Return the distances of the results of modules in forward, in the order of the program."""
    points = [
        GrowthPoint(aligner.a.rows[a].module, _relative(aligner, a, b))
        for a, b in step.order
        if a is not None
        and b is not None
        and _is_result(aligner.a.rows[a].kind, aligner.a.rows[a].phase)
    ]
    return points[:: -(-len(points) // _MOST_GROWTH)] if points else []


def _is_result(kind: str, phase: str) -> bool:
    return kind == "output" and phase == "forward"
