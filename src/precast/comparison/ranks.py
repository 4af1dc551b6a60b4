"""The files of the processes of one run: compared rank by rank, and held against each other.

Invariant: a rank is named only where it differs alone: before the others, or from replicas that were equal at first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from precast.comparison.aligned_steps import RunRows, StepRows, steps_of
from precast.comparison.difference import Cause, RunDifference
from precast.comparison.recording_file import RecordingReader
from precast.errors import ComparisonError

__all__ = ["RankDifference", "drifted_replica", "files_of", "merged", "pairs_of_files"]


class RankDifference(NamedTuple):
    """The difference of one process of two runs, with the step and the place in it of the first one."""

    rank: int
    difference: RunDifference
    position: tuple[float, int]


def files_of(path: Path) -> list[Path]:
    """Return the files of a run: the path itself, or those of its processes, by rank."""
    if path.exists():
        return [path]
    pattern = f"{path.stem}.rank*{path.suffix}"
    ranks = [(each.stem.rpartition(".rank")[2], each) for each in path.parent.glob(pattern)]
    files = [each for _, each in sorted((int(n), each) for n, each in ranks if n.isdecimal())]
    return files or [path]


def pairs_of_files(
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


def merged(
    a: str, b: str, ranks: Sequence[RankDifference], drifts: tuple[Cause | None, Cause | None]
) -> RunDifference:
    """Return the difference of all ranks: that of the rank which differs first, named if it is alone.

    Args:
        a: the name of the first run.
        b: the name of the second run.
        ranks: the difference of each rank.
        drifts: the replica that has drifted from the others in each run.
    """
    first = min(ranks, key=lambda each: each.position)
    result = first.difference
    is_alone = len(ranks) > 1 and sum(each.position == first.position for each in ranks) == 1
    cause, drift = result.cause, drifts[1] if drifts[0] is None else None
    if cause is not None and is_alone:
        text = f"rank {first.rank} differs before the others: {cause.kind}: {cause.difference}"
        cause = replace(cause, kind="rank", difference=text, rank=first.rank)
    elif drift is not None:
        cause = drift
    notes = dict.fromkeys(note for each in ranks for note in each.difference.notes)
    notes |= {
        f"In {name}: {each.difference}": None
        for name, each in zip((a, b), drifts, strict=True)
        if each
    }
    return replace(
        result,
        a=a,
        b=b,
        equal=all(each.difference.equal for each in ranks),
        distance=max(each.difference.distance for each in ranks),
        cause=cause,
        notes=list(notes),
    )


def drifted_replica(files: Sequence[Path]) -> Cause | None:
    """Return the first parameter of one rank that is no longer that of the others, although it was at first."""
    readers = [RecordingReader(path) for path in files]
    runs = [steps_of(reader, {}) for reader in readers]
    replicated: dict[str, bool] = {}
    try:
        for steps in zip(*runs, strict=False):
            of_ranks = [_weights(step) for step in steps]
            for name in sorted(set.intersection(*map(set, of_ranks))):
                counts = Counter(each[name] for each in of_ranks)
                if replicated.setdefault(name, len(counts) == 1) and len(counts) > 1:
                    usual, _ = counts.most_common(1)[0]
                    rank = max(n for n, each in enumerate(of_ranks) if each[name] != usual)
                    text = f"the replica of {name} in rank {rank} has drifted from those of the other ranks"
                    return Cause(
                        steps[0].step, name.rpartition(".")[0], name, "", "rank", text, rank
                    )
    finally:
        for reader in readers:
            reader.close()
    return None


def _weights(step: StepRows) -> dict[str, tuple[int, str]]:
    """Return the bits of the weights that a step read first, else of those that it updated."""
    run, weights = RunRows(), dict[str, tuple[int, str]]()
    for number in run.add(step):
        if run.rows[number].kind in {"weight", "update"}:
            weights.setdefault(run.rows[number].name, run.bits[number])
    return weights
