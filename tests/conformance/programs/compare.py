"""Runs random programs on PyTorch and on precast, and explains what differs by the written list of differences.

A program is *equal* where every result, gradient, dtype and flag is the same to the bit. It is *explained* where it is
so after PyTorch's cache was repaired at the divergence points of some intended differences (see `divergence_points`).
Where a program comes by such points it must be equal with all of them repaired, whether PyTorch was wrong or not: that
precast is wrong in the same way is no agreement. Everything else is *unexplained*.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations
from typing import Any

from torch import Tensor

from precast.engine import registration
from tests.conformance.differences import DIFFERENCES
from tests.conformance.programs.divergence_points import (
    NO_REPAIRS,
    Repairs,
    repair_ours,
    repair_pytorch,
)
from tests.conformance.programs.run import Found, run
from tests.conformance.programs.steps import Case
from tests.conformance.programs.world import Recorded
from tests.conformance.systems import TORCH, System
from tests.support.outcomes import same_bits

__all__ = ["Report", "compare", "difference", "explain", "repaired", "same", "shrink"]


@dataclass
class Report:
    """The result of a comparison; reports can be added."""

    programs: int = 0
    steps: int = 0
    equal: Counter[str] = field(default_factory=Counter)
    """By system."""
    explained: Counter[tuple[str, tuple[str, ...]]] = field(default_factory=Counter)
    """By system and the divergence points that had to be repaired."""
    unexplained: list[tuple[str, Case, str]] = field(default_factory=list)
    """System, shrunk case, what differs."""

    def __add__(self, other: Report) -> Report:
        return Report(
            self.programs + other.programs,
            self.steps + other.steps,
            self.equal + other.equal,
            self.explained + other.explained,
            self.unexplained + other.unexplained,
        )


def compare(cases: Sequence[Case], systems: Sequence[System]) -> Report:
    """Runs all cases on PyTorch, with nothing of precast on the dispatcher, then on each system."""
    report = Report(len(cases), sum(len(case.program) for case in cases))
    registration.unregister()
    theirs = [_run(case, TORCH) for case in cases]
    for system in systems:
        points = [_points(result, system) for result in theirs]
        registration.unregister()
        repaired = _with_repairs(cases, TORCH, points, theirs)
        with system():
            ours = [_run(case, system) for case in cases]
            ours_repaired = _with_repairs(cases, system, points, ours)
        agree = zip(map(_same, ours, theirs), map(_same, ours_repaired, repaired), strict=True)
        for case, both in zip(cases, agree, strict=True):
            if all(both):
                report.equal[system.name] += 1
            else:
                _look_closer(case, system, report)
    return report


def _with_repairs(
    cases: Sequence[Case],
    system: System,
    points: list[tuple[str, ...]],
    without: list[Found],
) -> list[Found]:
    """The runs with repairs; those that came by no divergence point are the runs `without`."""
    return [
        _run(case, system, each) if each else result
        for case, each, result in zip(cases, points, without, strict=True)
    ]


def _look_closer(case: Case, system: System, report: Report) -> None:
    points = explain(case, system)
    if points:
        report.explained[system.name, points] += 1
        return
    small = case if points is not None else shrink(case, lambda c: explain(c, system) is None)
    report.unexplained.append((system.name, small, _describe(small, system)))


def explain(case: Case, system: System) -> tuple[str, ...] | None:
    """The fewest points whose repair makes a system give what PyTorch gives; () where it does; None if none do."""
    if not _same(*repaired(case, system)):
        return None
    points = _points(_run_alone(case, TORCH), system)
    ours = _run_alone(case, system)
    subsets = chain.from_iterable(combinations(points, n) for n in range(len(points) + 1))
    for some in subsets:
        theirs = _run_alone(case, TORCH, some)
        if _same(ours, theirs) or (some and _same(_run_alone(case, system, some), theirs)):
            return some
    return None


def _points(found: Found, system: System) -> tuple[str, ...]:
    """The divergence points that a run came by at which PyTorch and the system are meant to differ."""
    installed = system.region is TORCH.region
    return tuple(
        d.point
        for d in DIFFERENCES
        if d.point in found.points and (d.when_installed or not installed)
    )


def repaired(case: Case, system: System) -> tuple[Found, Found]:
    """Return the results of the system and of PyTorch, with every divergence point of the list repaired."""
    points = _points(_run_alone(case, TORCH), system)
    return _run_alone(case, system, points), _run_alone(case, TORCH, points)


def shrink(case: Case, is_bad: Callable[[Case], bool]) -> Case:
    """The case with every step taken out that it can do without."""
    steps, place = case.program, len(case.program) - 1
    while place >= 0:
        fewer = (*steps[:place], *steps[place + 1 :])
        if is_bad(Case(fewer, case.seed)):
            steps = fewer
        place = min(place, len(steps)) - 1
    return Case(steps, case.seed)


def difference(ours: Found, theirs: Found) -> str | None:
    """The first thing in which two runs differ; None where they are the same to the bit."""
    for what in ("results", "gradients"):
        mine, other = getattr(ours, what), getattr(theirs, what)
        if len(mine) != len(other):
            return f"{len(mine)} {what} against {len(other)}"
        for place, pair in enumerate(zip(mine, other, strict=True)):
            for path, a, b in _differing(*pair):
                return f"{what}[{place}]{path}: {_short(a)} against {_short(b)}"
    return None


def same(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    """Return True if two lists of results have the same bits."""
    return not any(_differing(ours, theirs))


def _same(ours: Found, theirs: Found) -> bool:
    return difference(ours, theirs) is None


def _differing(mine: Any, other: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(mine, Recorded) and isinstance(other, Recorded):
        if mine[1:] != other[1:] or not _equal(mine.copy, other.copy):
            yield path, mine, other
    elif isinstance(mine, (list, tuple)) and isinstance(other, (list, tuple)):
        if len(mine) != len(other):
            yield path, mine, other
        for place, pair in enumerate(zip(mine, other, strict=False)):
            yield from _differing(*pair, f"{path}[{place}]")
    elif mine is not other and mine != other:
        yield path, mine, other


def _equal(mine: Tensor, other: Tensor) -> bool:
    return mine.dtype is other.dtype and mine.shape == other.shape and same_bits(mine, other)


def _short(value: Any) -> str:
    if isinstance(value, Recorded):
        tensor = value.copy
        return f"{tensor.dtype} {tensor.flatten()[:3].tolist()}... {value[1:]}"
    return repr(value)[:200]


def _run(case: Case, system: System, points: tuple[str, ...] = ()) -> Found:
    """One run; the system must be in force."""
    forget = repair_pytorch if system is TORCH else repair_ours
    repairs = Repairs(frozenset(points), forget) if points else NO_REPAIRS
    return run(*case, system.region, repairs=repairs)


def _run_alone(case: Case, system: System, points: tuple[str, ...] = ()) -> Found:
    with system():
        return _run(case, system, points)


def _describe(case: Case, system: System) -> str:
    """Describe the difference: unchanged, then with every divergence point repaired."""
    plain = difference(_run_alone(case, system), _run_alone(case, TORCH))
    return f"{plain}; with every divergence point repaired: {difference(*repaired(case, system))}"
