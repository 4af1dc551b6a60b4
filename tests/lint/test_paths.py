"""What is said of paths that are joined, and run once for many, is what each path by itself would say.

Random trainers are checked twice: as users do it, and by a run that takes each path for itself, with all that tests
said on it, and runs each function again for each of its callers' paths.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import pytest

from precast_lint.checking.engine import check
from precast_lint.parsing.syntax import Node
from precast_lint.parsing.text import decode
from precast_lint.selecting.registry import all_rules
from precast_lint.selecting.settings import LintSettings
from precast_lint.training_step import flow, flow_code
from precast_lint.training_step.flow_code import Ask, Code, Line, Put
from precast_lint.training_step.flow_events import Event
from precast_lint.training_step.flow_facts import joined
from precast_lint.training_step.flow_places import FlowPlace, Scaled
from precast_lint.training_step.flow_run import Say

CODES = frozenset(code for code in all_rules() if code.startswith("AMP2"))
ROUNDS = 3


class Path(NamedTuple):
    state: Hashable
    known: int = 0
    scaled: Scaled = frozenset()


Ends = list[tuple[str, Path]]


class EachByItself:
    """A run that joins nothing and remembers nothing."""

    def __init__(
        self, place: FlowPlace, on: Callable[[Any, Event, Say], Hashable], say: Say
    ) -> None:
        self.place = place
        self.on = on
        self.say = say

    def function(self, node: Node, start: Hashable) -> None:
        for how, path in self._code(self.place.code.parts, self.place, Path(start)):
            if how in ("", "return"):
                self.on(path.state, Event("return", node), self.say)

    def _code(self, code: Code, place: FlowPlace, path: Path) -> Ends:
        ends: Ends = [("", path)]
        for part in code:
            ends = [
                end
                for how, p in dict.fromkeys(ends)
                for end in (
                    [(how, p)] if how else getattr(self, type(part).__name__)(part, place, p)
                )
            ]
        return list(dict.fromkeys(ends))

    def Line(self, part: Line, place: FlowPlace, path: Path) -> Ends:
        state, known, scaled = path
        for step in part.steps:
            if isinstance(step, Put):
                known &= ~place.facts.about(step.name)
                scaled = place.stored(step, scaled)
            event = place.event(step, scaled) if isinstance(step, Ask) else step.event
            state = self.on(state, event, self.say)
        return [("", Path(state, known, scaled))]

    def Leave(self, part: flow_code.Leave, _: FlowPlace, path: Path) -> Ends:
        return [(part.how, path)]

    def Maybe(self, part: flow_code.Maybe, place: FlowPlace, path: Path) -> Ends:
        return [("", path), *self._code(part.code, place, path)]

    def Cases(self, part: flow_code.Cases, place: FlowPlace, path: Path) -> Ends:
        return [("", path), *(end for case in part.cases for end in self._code(case, place, path))]

    def Branch(self, part: flow_code.Branch, place: FlowPlace, path: Path) -> Ends:
        at = place.facts.place(part.text)
        sides = [(1 << at, part.yes if part.holds else part.no)]
        sides.append((2 << at, part.no if part.holds else part.yes))
        said = path.known & (3 << at)
        return [
            end
            for bit, code in sides
            if said in (0, bit)
            for end in self._code(code, place, path._replace(known=path.known | bit))
        ]

    def Follow(self, part: flow_code.Follow, place: FlowPlace, path: Path) -> Ends:
        inner = place.called(part)
        if inner is None:
            return self.Line(part.unfollowed, place, path)
        start = Path(path.state, inner.entered(path.known), place.handed(part, path.scaled))
        return [
            (
                "",
                Path(
                    p.state,
                    inner.left(path.known, p.known),
                    place.returned(part, path.scaled, p.scaled),
                ),
            )
            for how, p in self._code(inner.code.parts, inner, start)
            if how != "raise"
        ]

    def Try(self, part: flow_code.Try, place: FlowPlace, path: Path) -> Ends:
        ends: Ends = [("", path)]
        during = [path]
        for code in part.tried:
            ends = [
                e for how, p in ends for e in ([(how, p)] if how else self._code(code, place, p))
            ]
            during += [p for how, p in ends if not how]
        ends = self._then(ends, part.orelse, place)
        for handler in part.handlers:
            with self.say.only_good():
                for p in during:
                    self._code(handler, place, p)
            ends += self._code(handler, place, path)
        return self._then(ends, part.final, place)

    def _then(self, ends: Ends, code: Code, place: FlowPlace) -> Ends:
        return [e for how, p in ends for e in ([(how, p)] if how else self._code(code, place, p))]

    def Loop(self, part: flow_code.Loop, place: FlowPlace, path: Path) -> Ends:
        finished = [] if part.is_endless else [path]
        ends: Ends = []
        waiting, seen = [path], {path}
        for _ in range(ROUNDS):
            inside = [e for p in waiting for e in self._code((*part.begin, *part.body), place, p)]
            ends += [("", p) for how, p in inside if how == "break"]
            ends += [(how, p) for how, p in inside if how in ("return", "raise")]
            again = [p for how, p in inside if how in ("", "continue")]
            finished += [] if part.is_endless else again
            waiting = [p for p in dict.fromkeys(again) if p not in seen]
            seen.update(waiting)
        return self._then([("", p) for p in dict.fromkeys(finished)], part.orelse, place) + ends


ACTS = (
    "self.scaler.scale(loss).backward()",
    "loss = self.scaler.scale(loss)",
    "loss.backward()",
    "self.scaler.unscale_(self.optimizer)",
    "self.scaler.unscale_(optimizer)",
    "torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)",
    "self.scaler.step(self.optimizer)",
    "self.scaler.step(optimizer)",
    "self.scaler.update()",
    "self.optimizer.zero_grad()",
    "self.optimizer.step()",
    "self.log(loss)",
    "self.ready = self.model(loss)",
    "ready = optimizer is None",
    "loss = self.model(loss)",
)
TESTS = ("self.ready", "ready", "not ready", "optimizer")
METHODS = 3


def _statements(draw: random.Random, depth: int, *, in_loop: bool, method: int) -> Iterator[str]:
    for _ in range(draw.randint(2, 4)):
        kind = draw.random()
        inner = depth + 1

        def block(in_loop: bool = in_loop, inner: int = inner) -> list[str]:
            return [
                f"    {line}" for line in _statements(draw, inner, in_loop=in_loop, method=method)
            ]

        if kind < 0.45 or depth > 1:
            yield draw.choice(ACTS)
        elif kind < 0.65:
            yield from (f"if {draw.choice(TESTS)}:", *block())
            if draw.random() < 0.5:
                yield from ("else:", *block())
        elif kind < 0.75:
            yield from ("for loss in batches:", *block(in_loop=True))
        elif kind < 0.8:
            yield from ("try:", *block(), "except ValueError:", *block())
        elif kind < 0.85:
            yield draw.choice(("break", "continue") if in_loop else ("return", "raise ValueError"))
        elif method + 1 < METHODS:
            name = f"self.part{draw.randrange(method + 1, METHODS)}"
            yield f"{name}({draw.choice(('loss', 'loss, ready', 'loss, ready, self.optimizer'))})"
        else:
            yield f"self.ready and {draw.choice(ACTS[:1] + ACTS[2:4] + ACTS[5:10])}"


def _trainer(seed: int) -> str:
    draw = random.Random(seed)
    lines = [
        "import torch",
        "class Trainer:",
        "    def __init__(self, model):",
        '        self.scaler = torch.amp.GradScaler("cuda")',
        "        self.optimizer = torch.optim.SGD(model.parameters(), 0.1)",
    ]
    for method in range(METHODS):
        lines.append(f"    def part{method}(self, loss, ready=None, optimizer=None, batches=()):")
        body = _statements(draw, 0, in_loop=False, method=method)
        lines += [f"        {line}" for line in body]
    return "\n".join(lines) + "\n"


def _said(program: str) -> list[tuple[str, int]]:
    found = check(decode(program.encode()), "example.py", LintSettings(codes=CODES)).findings
    return [(finding.code, finding.span.start) for finding in found]


def test_paths_that_are_joined_say_what_each_by_itself_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    programs = [_trainer(seed) for seed in range(150)]
    said = [_said(program) for program in programs]
    monkeypatch.setattr(flow, "FlowRun", EachByItself)
    assert sum(map(bool, said)) > 50  # most random trainers are wrong
    for program, findings in zip(programs, said, strict=True):
        assert _said(program) == findings, program


def _meant(facts: int, tests: int) -> set[tuple[bool, ...]]:
    """The worlds in which some facts hold."""
    return {
        world
        for world in itertools.product((True, False), repeat=tests)
        if not any(facts >> 2 * i & (2 if holds else 1) for i, holds in enumerate(world))
    }


def test_joined_facts_mean_what_they_meant_before() -> None:
    draw = random.Random(0)
    for _ in range(500):
        sides = [
            [draw.choice((0, 1, 2)) << 2 * i for i in range(4)] for _ in range(draw.randint(1, 9))
        ]
        facts = frozenset(sum(side) for side in sides)
        after = joined(facts)
        assert len(after) <= len(facts)
        before_worlds = set[tuple[bool, ...]]().union(*(_meant(one, 4) for one in facts))
        assert set[tuple[bool, ...]]().union(*(_meant(one, 4) for one in after)) == before_worlds


def test_both_sides_of_a_test_are_one_that_knows_nothing_of_it() -> None:
    assert joined(frozenset({0b0101, 0b1001})) == (0b0001,)
    assert joined(frozenset({0b01, 0b0101})) == (0b01,)
