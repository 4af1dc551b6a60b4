"""Run of a rule along the paths through a function, as `flow.py` describes.

Work is shared between paths: a line runs once for each state, a called function once for each state and each set of
facts that it uses, and paths that differ only in the result of a test are merged after the test.

Invariants: a `Path` is a value; a path that leaves a block by `break`, `continue`, `return` or `raise` does not
reach the statements after it; the number of paths is bounded, first by dropping facts, and so is the work.
A rule is called once for an event in a state: its result must depend on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from precast_lint.parsing.syntax import Node
from precast_lint.training_step.flow_code import (
    Ask,
    Branch,
    Code,
    Follow,
    Leave,
    Line,
    Loop,
    Maybe,
    Part,
    Put,
    Try,
)
from precast_lint.training_step.flow_events import Event
from precast_lint.training_step.flow_facts import merge_facts
from precast_lint.training_step.flow_places import FlowPlace, Scaled

__all__ = ["FlowRun", "Say", "TooManyPaths"]

_LIMIT = 128
_WORK = 30_000  # some tenths of a second; functions that call functions, each on many paths, could take hours
_ROUNDS = 3


class TooManyPaths(Exception):  # noqa: N818
    """A function has too many paths to follow."""


class Say:
    """A rule's judgements of nodes."""

    def __init__(self) -> None:
        self._bad: dict[Node, str | None] = {}
        self._good: set[Node] = set()

    def bad(self, node: Node, message: str | None = None) -> None:
        """Record that a node is wrong on this path."""
        self._bad.setdefault(node, message)

    def good(self, node: Node) -> None:
        """Record that a node is right on this path, which excuses other paths."""
        self._good.add(node)

    def is_good(self, node: Node) -> bool:
        """Return True if the node is right on some path."""
        return node in self._good

    @contextmanager
    def only_good(self) -> Iterator[None]:
        """Ignore calls of `bad` in this context."""
        bad, self._bad = self._bad, dict[Node, str | None]()
        yield
        self._bad = bad

    def hear(self, other: Say) -> None:
        """Add the judgements of another object."""
        self._bad = other._bad | self._bad
        self._good |= other._good

    def reported(self) -> Iterator[tuple[Node, str | None]]:
        """Yield the nodes that are bad on some path and good on none."""
        for node, message in self._bad.items():
            if node not in self._good:
                yield node, message


class Path(NamedTuple):
    """A path's state: the number of the rule's state, the results of tests, and the names that hold scaled losses."""

    state: int
    facts: int = 0
    scaled: Scaled = frozenset()


_Paths = dict[Path, None]
"""A set of paths in their order of creation, so that results are deterministic."""


@dataclass
class _Leaving:
    """The paths that leave the innermost loop or the function."""

    breaks: _Paths = field(default_factory=dict)
    continues: _Paths = field(default_factory=dict)
    returned: _Paths = field(default_factory=dict)


@dataclass
class _Memory:
    """Cached transitions of a rule: by an event, along a line, and through functions."""

    moves: dict[Event, dict[int, int]] = field(default_factory=dict)
    lines: dict[tuple[FlowPlace, Line], dict[tuple[int, Scaled], tuple[int, Scaled]]] = field(
        default_factory=dict
    )
    ends: dict[tuple[FlowPlace, Path], _Paths] = field(default_factory=dict)


class FlowRun:
    """One rule's way through one function."""

    def __init__(
        self, place: FlowPlace, on: Callable[[Any, Event, Say], Hashable], say: Say
    ) -> None:
        self.place = place
        self.on = on
        self.say = say
        self.work = 0  # the number of parts, counted for each path
        self.states: list[Hashable] = []
        self.numbers: dict[Hashable, int] = {}
        self.memory = _Memory()
        self.only_good_memory = _Memory()  # used while `say` ignores `bad`
        self.leaving = _Leaving()

    def function(self, node: Node, start: Hashable) -> None:
        """Run a whole function or module."""
        paths = self._parts(self.place.code.parts, self.place, {Path(self._number(start)): None})
        event = Event("return", node)
        for path in paths | self.leaving.returned:
            self._moved(path.state, event)

    def _number(self, state: Hashable) -> int:
        result = self.numbers.get(state)
        if result is None:
            result = self.numbers[state] = len(self.states)
            self.states.append(state)
        return result

    def _moved(self, state: int, event: Event) -> int:
        moves = self.memory.moves.get(event)
        if moves is None:
            moves = self.memory.moves[event] = {}
        after = moves.get(state)
        if after is None:
            after = moves[state] = self._number(self.on(self.states[state], event, self.say))
        return after

    # --- parts ---

    def _parts(self, code: Code, place: FlowPlace, paths: _Paths) -> _Paths:
        for part in code:
            if not paths:
                return paths
            self.work += len(paths)
            if self.work > _WORK:
                raise TooManyPaths
            if isinstance(part, Line):
                paths = self._line(part, place, paths)
            else:
                paths = self._bounded(self._part(part, place, paths), place)
        return paths

    def _part(self, part: Part, place: FlowPlace, paths: _Paths) -> _Paths:
        if isinstance(part, Branch):
            return self._branch(part, place, paths)
        if isinstance(part, Follow):
            return self._follow(part, place, paths)
        if isinstance(part, Leave):
            return self._leave(part, paths)
        if isinstance(part, Maybe):
            return paths | self._parts(part.code, place, paths)
        if isinstance(part, Loop):
            return self._loop(part, place, paths)
        assert isinstance(part, Try)
        return self._try(part, place, paths)

    def _line(self, line: Line, place: FlowPlace, paths: _Paths) -> _Paths:
        entries = self.memory.lines.get((place, line))
        if entries is None:
            entries = self.memory.lines[place, line] = {}
        rest = ~place.forgotten(line)
        after: _Paths = {}
        for path in paths:
            state, facts, scaled = path
            end = entries.get((state, scaled))
            if end is None:
                end = entries[state, scaled] = self._along(line, place, state, scaled)
            if end[0] == state and end[1] == scaled and facts & rest == facts:
                after[path] = None
            else:
                after[Path(end[0], facts & rest, end[1])] = None
        return after

    def _along(
        self, line: Line, place: FlowPlace, state: int, scaled: Scaled
    ) -> tuple[int, Scaled]:
        """Return the state after a line, which does not depend on tests."""
        for step in line.steps:
            if isinstance(step, Put):
                scaled, event = place.stored(step, scaled), place.put(step)
            else:
                event = place.event(step, scaled) if isinstance(step, Ask) else step.event
            state = self._moved(state, event)
        return state, scaled

    def _leave(self, part: Leave, paths: _Paths) -> _Paths:
        if part.how == "return":
            self.leaving.returned |= paths
        elif part.how == "break":
            self.leaving.breaks |= paths
        elif part.how == "continue":
            self.leaving.continues |= paths
        return {}

    def _branch(self, part: Branch, place: FlowPlace, paths: _Paths) -> _Paths:
        """Run both sides of a test, each on the paths that may reach it, and merge the paths."""
        at = place.facts.position(part.text)
        yes, no = (1 << at, 2 << at) if part.holds else (2 << at, 1 << at)
        holds = {Path(p.state, p.facts | yes, p.scaled): None for p in paths if not p.facts & no}
        fails = {Path(p.state, p.facts | no, p.scaled): None for p in paths if not p.facts & yes}
        after = self._parts(part.yes, place, holds)
        return _joined(after | self._parts(part.no, place, fails))

    def _try(self, part: Try, place: FlowPlace, paths: _Paths) -> _Paths:
        before, during = paths, dict(paths)
        for code in part.tried:
            paths = self._parts(code, place, paths)
            during |= paths
        paths = self._parts(part.orelse, place, paths)
        for handler in part.handlers:
            paths = paths | self._handler(handler, place, before, during)
        return self._parts(part.final, place, paths)

    def _handler(self, code: Code, place: FlowPlace, before: _Paths, during: _Paths) -> _Paths:
        """Run an `except` block as if the `try` block had done nothing.

        The states within the `try` block only excuse nodes of the `except` block.
        """
        leaving, self.leaving = self.leaving, _Leaving()
        memory, self.memory = self.memory, self.only_good_memory
        with self.say.only_good():
            self._parts(code, place, self._bounded(during, place))
        self.leaving, self.memory = leaving, memory
        return self._parts(code, place, before)

    def _loop(self, part: Loop, place: FlowPlace, paths: _Paths) -> _Paths:
        finished = {} if part.is_endless else dict(paths)
        broken: _Paths = {}
        visited: dict[tuple[int, Scaled], list[int]] = {}
        for _ in range(_ROUNDS):
            for path in paths:
                visited.setdefault((path.state, path.scaled), []).append(path.facts)
            leaving = self.leaving
            self.leaving = _Leaving(returned=leaving.returned)
            inside = self._parts(part.body, place, self._parts(part.begin, place, paths))
            rest, self.leaving = self.leaving, leaving
            inside |= rest.continues
            broken |= rest.breaks
            if not part.is_endless:
                finished |= inside
            paths = self._bounded(_new(_joined(inside), visited), place)
            if not paths:
                break
        return self._parts(part.orelse, place, _joined(finished)) | broken

    # --- functions of this file ---

    def _follow(self, part: Follow, place: FlowPlace, paths: _Paths) -> _Paths:
        """Run a called function; its effects on arguments and on self are effects on the caller's names."""
        inner = place.called(part)
        if inner is None:
            return self._line(part.unfollowed, place, paths)
        if not inner.code.parts:
            return paths
        request = inner.asked()
        after: _Paths = {}
        for path in paths:
            entry = inner.entered(path.facts)
            start = Path(path.state, entry & request, place.handed(part, path.scaled))
            aside = entry & ~request
            for end in self._ends(inner, start):
                rest = inner.left(path.facts, end.facts | aside)
                after[Path(end.state, rest, place.returned(part, path.scaled, end.scaled))] = None
        return _joined(after)

    def _ends(self, place: FlowPlace, start: Path) -> _Paths:
        """Return the ends of the paths through a function. Each start is run once."""
        result = self.memory.ends.get((place, start))
        if result is None:
            leaving, self.leaving = self.leaving, _Leaving()
            ends = self._parts(place.code.parts, place, {start: None})
            ends = _joined(ends | self.leaving.returned)
            self.leaving = leaving
            result = self.memory.ends[place, start] = _told_apart(ends)
        return result

    def _bounded(self, paths: _Paths, place: FlowPlace) -> _Paths:
        """Return the paths. If there are too many, drop facts, those on scalers last."""
        if len(paths) > _LIMIT:
            paths = _joined(paths)
        for selection in (place.deciding, 0) if len(paths) > _LIMIT else ():
            if len(paths) > _LIMIT:
                paths = {Path(p.state, p.facts & selection, p.scaled): None for p in paths}
        if len(paths) > _LIMIT:
            raise TooManyPaths
        return paths


def _joined(paths: _Paths) -> _Paths:
    """Merge paths that differ only in the results of tests."""
    if len(paths) < 2:
        return paths
    groups: dict[tuple[int, Scaled], list[int]] = {}
    for state, entry, scaled in paths:
        groups.setdefault((state, scaled), []).append(entry)
    if len(groups) == len(paths):
        return paths
    after: _Paths = {}
    for (state, scaled), facts in groups.items():
        for entry in merge_facts(frozenset(facts)) if len(facts) > 1 else facts:
            after[Path(state, entry, scaled)] = None
    return after


def _new(paths: Iterable[Path], visited: dict[tuple[int, Scaled], list[int]]) -> _Paths:
    return {
        path: None
        for path in paths
        if not any(old & path.facts == old for old in visited.get((path.state, path.scaled), ()))
    }


def _told_apart(paths: _Paths) -> _Paths:
    """Return one path with the common facts if all paths have the same state, else the paths."""
    first = next(iter(paths), None)
    if first is None or any(p[0] != first.state or p[2] != first.scaled for p in paths):
        return paths
    entry = first.facts
    for path in paths:
        entry &= path.facts
    return {first._replace(facts=entry): None}
