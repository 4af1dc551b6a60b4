"""Runs a function's statements on sets of paths; `flow.py` says what for.

Invariants: a `Path` is a value; what leaves a block by `break`, `continue`, `return` or `raise` does not
reach the statements after it; the number of paths is bounded, first by forgetting what tests said, and so is the work.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from precast_lint.meaning.functions import followed_call
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, children, cst
from precast_lint.training_step.flow_events import (
    Event,
    Known,
    call_event,
    key,
    scaler_of,
    with_event,
)
from precast_lint.training_step.frames import Frame, frame_of

__all__ = ["Run", "Say", "TooManyPaths"]

_LIMIT = 128
_WORK = 30_000  # some tenths of a second; functions that call functions, each on many paths, could take hours
_DEEP = 3  # calls in functions that are called
_ROUNDS = 3
_DOES, _RUNS_LATER = (cst.Call, cst.NamedExpr), (cst.Lambda, cst.FunctionDef, cst.ClassDef)


class TooManyPaths(Exception):  # noqa: N818
    """A function is too branched to be followed."""


class Say:
    """What a rule has said about nodes."""

    def __init__(self) -> None:
        self._bad: dict[Node, str | None] = {}
        self._good: set[Node] = set()

    def bad(self, node: Node, message: str | None = None) -> None:
        """The node is wrong on this path."""
        self._bad.setdefault(node, message)

    def good(self, node: Node) -> None:
        """The node is right on this path, which excuses it on others."""
        self._good.add(node)

    def is_good(self, node: Node) -> bool:
        """Whether the node is right on some path."""
        return node in self._good

    @contextmanager
    def only_good(self) -> Iterator[None]:
        """What is called bad meanwhile does not count."""
        bad, self._bad = self._bad, dict[Node, str | None]()
        yield
        self._bad = bad

    def hear(self, other: Say) -> None:
        """Takes over what another has said."""
        self._bad = other._bad | self._bad
        self._good |= other._good

    def reported(self) -> Iterator[tuple[Node, str | None]]:
        """The nodes that are bad on some path and good on none."""
        for node, message in self._bad.items():
            if node not in self._good:
                yield node, message


class Path(NamedTuple):
    """Where a path has come to: the rule's state, what tests said, which names hold scaled losses."""

    state: Hashable
    known: frozenset[tuple[str, bool]] = frozenset()
    scaled: frozenset[tuple[str, str]] = frozenset()


_Paths = frozenset[Path]


@dataclass
class _Loop:
    breaks: set[Path] = field(default_factory=set)
    continues: set[Path] = field(default_factory=set)


class Run:
    """One rule's way through one function."""

    def __init__(
        self,
        source: Source,
        on: Callable[[Any, Event, Say], Hashable],
        say: Say,
        optimizers: frozenset[str],
        scalers: frozenset[str],
    ) -> None:
        self.source = source
        self.on = on
        self.say = say
        self.known = Known(source, lambda node: key(source, node), scalers, optimizers)
        self.deciding = (
            scalers  # what tests may ask for, by the names of the function that runs now
        )
        self.work = 0  # statements, each counted once for each path that comes by
        self.loops: list[_Loop] = []
        self.returned: set[Path] = set()
        self.called: list[
            cst.FunctionDef
        ] = []  # those of this file that run now, the innermost last
        self.ends: dict[tuple[object, ...], _Paths] = {}  # of functions, by where they began

    def function(self, node: Node, start: Hashable) -> None:
        """Runs a whole function or module."""
        assert isinstance(node, (cst.FunctionDef, cst.Module))
        paths: _Paths = frozenset({Path(start)})
        paths = self.block(node.body if isinstance(node, cst.Module) else node.body.body, paths)
        self.emit(Event("return", node), paths | frozenset(self.returned))

    def emit(self, event: Event, paths: _Paths) -> _Paths:
        """Tells the rule of an event on each path."""
        states = {state: self.on(state, event, self.say) for state in {p.state for p in paths}}
        if all(before == after for before, after in states.items()):
            return paths
        return frozenset(Path(states[p.state], p.known, p.scaled) for p in paths)

    # --- statements ---

    def block(self, statements: Sequence[Node], paths: _Paths) -> _Paths:
        """Runs statements one after the other."""
        for statement in statements:
            if not paths:
                return paths
            self.work += len(paths)
            if self.work > _WORK:
                raise TooManyPaths
            handler = getattr(self, f"_{type(statement).__name__}", self._other)
            paths = self._bounded(handler(statement, paths))
        return paths

    def _other(self, statement: Node, paths: _Paths) -> _Paths:
        for child in children(statement):
            paths = self.expression(child, paths)
        return paths

    def _SimpleStatementLine(self, line: cst.SimpleStatementLine, paths: _Paths) -> _Paths:
        return self.block(line.body, paths)

    def _suite(self, body: Node, paths: _Paths) -> _Paths:
        assert isinstance(body, (cst.IndentedBlock, cst.SimpleStatementSuite))
        return self.block(body.body, paths)

    def _FunctionDef(self, _: Node, paths: _Paths) -> _Paths:
        return paths

    _ClassDef = _FunctionDef

    def _Return(self, statement: cst.Return, paths: _Paths) -> _Paths:
        self.returned |= self._other(statement, paths)
        return frozenset()

    def _Raise(self, statement: cst.Raise, paths: _Paths) -> _Paths:
        self._other(statement, paths)
        return frozenset()

    def _Break(self, _: Node, paths: _Paths) -> _Paths:
        self.loops[-1].breaks |= paths
        return frozenset()

    def _Continue(self, _: Node, paths: _Paths) -> _Paths:
        self.loops[-1].continues |= paths
        return frozenset()

    def _Assign(self, statement: cst.Assign, paths: _Paths) -> _Paths:
        paths = self.expression(statement.value, paths)
        for target in statement.targets:
            paths = self._store(target.target, statement.value, paths)
        return paths

    def _AnnAssign(self, statement: cst.AnnAssign, paths: _Paths) -> _Paths:
        if statement.value is None:
            return paths
        paths = self.expression(statement.value, paths)
        return self._store(statement.target, statement.value, paths)

    def _AugAssign(self, statement: cst.AugAssign, paths: _Paths) -> _Paths:
        paths = self.expression(statement.value, paths)
        name = key(self.source, statement.target) or ""
        paths = frozenset(Path(p.state, _without(p.known, name), p.scaled) for p in paths)
        return self.emit(Event("assign", statement.target, name, value=statement.value), paths)

    def _store(self, target: Node, value: Node | None, paths: _Paths) -> _Paths:
        if isinstance(target, (cst.Tuple, cst.List)):
            for element in target.elements:
                paths = self._store(element.value, None, paths)
            return paths
        name = key(self.source, target) or ""
        after = {}
        for before in {path.scaled for path in paths}:
            scaler = scaler_of(self.known, value, dict(before)) if _is_loss(value) else None
            left = frozenset(pair for pair in before if pair[0] != name)
            after[before] = left | {(name, scaler)} if scaler else left
        stored = frozenset(Path(p.state, _without(p.known, name), after[p.scaled]) for p in paths)
        return self.emit(Event("assign", target, name, value=value), stored)

    def _If(self, statement: cst.If, paths: _Paths) -> _Paths:
        paths = self.expression(statement.test, paths)
        yes, no = self._split(statement.test, paths)
        yes = self._suite(statement.body, yes)
        if isinstance(statement.orelse, cst.If):
            no = self._If(statement.orelse, no) if no else no
        elif statement.orelse is not None:
            no = self._suite(statement.orelse.body, no)
        return yes | no

    def _With(self, statement: cst.With, paths: _Paths) -> _Paths:
        for item in statement.items:
            paths = self.expression(item.item, paths)
            paths = self.emit(with_event(self.source, "enter", item, statement), paths)
            if item.asname is not None:
                paths = self._store(item.asname.name, None, paths)
        paths = self._suite(statement.body, paths)
        for item in reversed(statement.items):
            paths = self.emit(with_event(self.source, "leave", item, statement), paths)
        return paths

    def _Try(self, statement: cst.Try | cst.TryStar, paths: _Paths) -> _Paths:
        before, during = paths, set(paths)
        for line in statement.body.body:
            paths = self.block([line], paths)
            during |= paths
        if statement.orelse is not None:
            paths = self._suite(statement.orelse.body, paths)
        for handler in statement.handlers:
            paths |= self._handler(handler, before, frozenset(during))
        if statement.finalbody is not None:
            paths = self._suite(statement.finalbody.body, paths)
        return paths

    def _handler(self, handler: Node, before: _Paths, during: _Paths) -> _Paths:
        """Runs an `except` block as if nothing of what was tried had happened.

        Some of it may have happened: that only excuses what the block does, for the rest would be a guess.
        """
        assert isinstance(handler, (cst.ExceptHandler, cst.ExceptStarHandler))
        loops, returned, self.loops = self.loops, self.returned, [_Loop() for _ in self.loops]
        self.returned = set()
        with self.say.only_good():
            self._suite(handler.body, self._bounded(during))
        self.loops, self.returned = loops, returned
        return self._suite(handler.body, before)

    _TryStar = _Try

    def _Match(self, statement: cst.Match, paths: _Paths) -> _Paths:
        paths = self.expression(statement.subject, paths)
        after = paths
        for case in statement.cases:
            after |= self._suite(case.body, paths)
        return after

    def _For(self, statement: cst.For, paths: _Paths) -> _Paths:
        paths = self.expression(statement.iter, paths)

        def begin(inside: _Paths) -> _Paths:
            return self._store(statement.target, None, inside)

        return self._loop(statement, paths, begin, ends=paths)

    def _While(self, statement: cst.While, paths: _Paths) -> _Paths:
        forever = isinstance(statement.test, cst.Name) and statement.test.value == "True"
        forever |= isinstance(statement.test, cst.Integer) and statement.test.value == "1"

        def begin(inside: _Paths) -> _Paths:
            return self.expression(statement.test, inside)

        return self._loop(statement, paths, begin, ends=None if forever else paths)

    def _loop(
        self,
        statement: cst.For | cst.While,
        paths: _Paths,
        begin: Callable[[_Paths], _Paths],
        ends: _Paths | None,
    ) -> _Paths:
        """Runs a loop's body until nothing new comes; `ends`: the paths that never enter it."""
        finished = set(ends or ())
        broken: set[Path] = set()
        seen: set[Path] = set()
        for _ in range(_ROUNDS):
            seen |= paths
            self.loops.append(_Loop())
            inside = self.emit(Event("loop", statement), begin(paths))
            inside = self._suite(statement.body, inside)
            loop = self.loops.pop()
            inside = self.emit(Event("next", statement), inside | frozenset(loop.continues))
            broken |= loop.breaks
            if ends is not None:
                finished |= inside
            paths = self._bounded(inside - seen)
            if not paths:
                break
        after = frozenset(finished)
        if statement.orelse is not None:
            after = self._suite(statement.orelse.body, after)
        return after | frozenset(broken)

    # --- expressions ---

    def expression(self, node: Node, paths: _Paths) -> _Paths:
        """The events of an expression, what is inside first."""
        parts = self._parts(node)
        if not (parts or _is_event(node)):
            return paths
        if isinstance(node, cst.IfExp):
            paths = self.expression(node.test, paths)
            yes, no = self._split(node.test, paths)
            return self.expression(node.body, yes) | self.expression(node.orelse, no)
        if isinstance(node, cst.BooleanOperation):
            paths = self.expression(node.left, paths)
            return paths | self.expression(node.right, paths)
        if isinstance(node, cst.NamedExpr):
            return self._store(node.target, node.value, self.expression(node.value, paths))
        for child in parts:
            paths = self.expression(child, paths)
        if isinstance(node, cst.Call):
            return self._call(node, paths)
        if isinstance(node, cst.Attribute) and node.attr.value == "grad":
            return self.emit(Event("grad_read", node, key(self.source, node.value)), paths)
        return paths

    def _parts(self, node: Node) -> tuple[Node, ...]:
        """What is directly inside an expression, and has events; found once, as many paths come by."""
        known = self.source.cache.setdefault("parts with events", {})
        assert isinstance(known, dict)
        if node not in known:
            inside = () if isinstance(node, _RUNS_LATER) else children(node)
            known[node] = tuple(n for n in inside if _is_event(n) or self._parts(n))
        found: tuple[Node, ...] = known[node]
        return found

    def _call(self, call: cst.Call, paths: _Paths) -> _Paths:
        found = followed_call(self.source, call)
        if found is not None and found[0] not in self.called and len(self.called) < _DEEP:
            return self._run_called(*found, paths)
        after: set[Path] = set()
        for scaled in {path.scaled for path in paths}:
            event = call_event(self.known, call, dict(scaled))
            after |= self.emit(event, frozenset(p for p in paths if p.scaled == scaled))
        return frozenset(after)

    def _run_called(
        self, function: cst.FunctionDef, given: dict[str, Node], paths: _Paths
    ) -> _Paths:
        """Runs a function of this file: what it does to what its parameters stand for, and to self, is done here."""
        frame = frame_of(self.source, function, given, self.known.named)
        after: set[Path] = set()
        for path in paths:
            handed = self._handed(given, dict(path.scaled))
            known = _of_self(path.known) | _said_of(path.known, frame.called)
            inner = Path(path.state, known, _of_self(path.scaled) | handed)
            after |= {
                Path(
                    p.state,
                    _kept(path.known, p.known) | _said_of(p.known, frame.names),
                    _kept(path.scaled, p.scaled),
                )
                for p in self._ends(frame, inner)
            }
        return self._bounded(after)

    def _ends(self, frame: Frame, start: Path) -> _Paths:
        """The ends of the paths through a function; each beginning is run once, as many paths share it."""
        begun = (frame.function, frozenset(frame.names.items()), *self.called, start)
        if begun not in self.ends:
            loops, returned, outer, deciding = self.loops, self.returned, self.known, self.deciding
            self.deciding |= {name for name, given in frame.names.items() if given in deciding}
            self.loops, self.returned = [], set()
            self.known = replace(outer, named=frame.named)
            self.called.append(frame.function)
            ends = self._suite(frame.function.body, frozenset({start})) | frozenset(self.returned)
            self.called.pop()
            self.loops, self.returned, self.known, self.deciding = loops, returned, outer, deciding
            self.ends[begun] = _told_apart(ends)
        return self.ends[begun]

    def _handed(self, given: dict[str, Node], scaled: dict[str, str]) -> frozenset[tuple[str, str]]:
        """The parameters of a function that get scaled losses, each with its scaler."""
        found: set[tuple[str, str]] = set()
        for name, value in given.items():
            scaler = scaler_of(self.known, value, scaled) if _is_loss(value) else None
            if scaler is not None:
                found.add((name, scaler))
        return frozenset(found)

    def _split(self, test: Node, paths: _Paths) -> tuple[_Paths, _Paths]:
        """The paths on which a test holds, and those on which it does not."""
        text, holds = _condition(self.source, test)
        said, unsaid = (text, holds), (text, not holds)
        yes = (Path(p.state, p.known | {said}, p.scaled) for p in paths if unsaid not in p.known)
        no = (Path(p.state, p.known | {unsaid}, p.scaled) for p in paths if said not in p.known)
        return frozenset(yes), frozenset(no)

    def _bounded(self, paths: Iterable[Path]) -> _Paths:
        """The paths, of which too many forget what tests said; whether there is a scaler comes last."""
        paths = frozenset(paths)
        for kept in (self.deciding, frozenset[str]()):
            if len(paths) > _LIMIT:
                paths = frozenset(Path(p.state, _about(p.known, kept), p.scaled) for p in paths)
        if len(paths) > _LIMIT:
            raise TooManyPaths
        return paths


def _is_event(node: Node) -> bool:
    """Whether an expression does something itself, whatever is inside it."""
    return isinstance(node, _DOES) or (
        isinstance(node, cst.Attribute) and node.attr.value == "grad"
    )


def _condition(source: Source, test: Node) -> tuple[str, bool]:
    """A test as text, and whether it is that text or its opposite: `x is not None` is `x`."""
    if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
        text, holds = _condition(source, test.expression)
        return text, not holds
    if isinstance(test, cst.Comparison) and len(test.comparisons) == 1:
        comparison = test.comparisons[0]
        right = comparison.comparator
        if isinstance(right, cst.Name) and right.value in ("None", "True", "False"):
            same = isinstance(comparison.operator, (cst.Is, cst.Equal))
            text = key(source, test.left) or ""
            return text, same is (right.value == "True")
    return key(source, test) or "", True


_Pair = TypeVar("_Pair", tuple[str, bool], tuple[str, str])


def _of_self(pairs: frozenset[_Pair]) -> frozenset[_Pair]:
    """What is known of attributes of self, which a method knows by the same names."""
    return frozenset(pair for pair in pairs if pair[0].startswith("self."))


def _said_of(
    known: frozenset[tuple[str, bool]], names: dict[str, str]
) -> frozenset[tuple[str, bool]]:
    """What tests said of some variables, by the names that these have elsewhere."""
    return frozenset((names[text], holds) for text, holds in known if names.get(text))


def _kept(before: frozenset[_Pair], after: frozenset[_Pair]) -> frozenset[_Pair]:
    """What a function knows when a method returns: of its own names what it knew, of self's what the method knows."""
    return (before - _of_self(before)) | _of_self(after)


@lru_cache(maxsize=4096)  # many paths know the same
def _without(known: frozenset[tuple[str, bool]], name: str) -> frozenset[tuple[str, bool]]:
    """What tests said, without those in which a name occurs that has a new value now."""
    word = re.compile(rf"(?<![\w.]){re.escape(name)}\b")
    return frozenset(pair for pair in known if not (name in pair[0] and word.search(pair[0])))


def _is_loss(value: Node | None) -> bool:
    """Whether a value can be a scaled loss: a call of scale, or arithmetic with one."""
    if isinstance(value, cst.BinaryOperation):
        return _is_loss(value.left) or _is_loss(value.right)
    if isinstance(value, cst.Call):
        return isinstance(value.func, cst.Attribute) and value.func.attr.value == "scale"
    return isinstance(value, (cst.Name, cst.Attribute))


@lru_cache(maxsize=4096)
def _about(
    known: frozenset[tuple[str, bool]], texts: frozenset[str]
) -> frozenset[tuple[str, bool]]:
    return frozenset(pair for pair in known if pair[0] in texts)


def _told_apart(paths: _Paths) -> _Paths:
    """One path for several that have come to the same: what tests said on only some of them decides nothing."""
    if len(paths) < 2 or len({(path.state, path.scaled) for path in paths}) > 1:
        return paths
    known = frozenset.intersection(*(path.known for path in paths))
    return frozenset({next(iter(paths))._replace(known=known)})
