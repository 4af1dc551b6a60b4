"""How many mistakes the checker finds: each program with each mistake, as it stands and written differently.

Invariants: every mistake is looked for by its own rule alone; what is counted is valid Python; the same seed gives the
same sample.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst

from precast_lint.checking.engine import check
from precast_lint.parsing.text import decode
from precast_lint.selecting.settings import Settings
from tests.lint.mutation import misuse, names, numbers, protocol, regions  # they register
from tests.lint.mutation.programs import PROGRAMS
from tests.lint.mutation.registry import MUTATORS
from tests.lint.mutation.trees import source
from tests.lint.mutation.wrappers import WRAPPERS

__all__ = ["Mistake", "alarms", "correct", "is_found", "mistakes", "sample", "table"]

# A program that asks for PyTorch's version imports what that version has.
_IMPORTING = ("from_imports", "amp_module", "exported_name")
_GROUPS = (names, misuse, protocol, regions, numbers)


@dataclass(frozen=True)
class Mistake:
    """A program with one mistake: of which rule, made in which program by which mutator, and written how."""

    code: str
    program: str
    mutator: str
    number: int
    wrappers: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        how = " + ".join(self.wrappers) or "as it stands"
        return f"{self.code} {self.mutator} {self.number} in {self.program}, {how}"


def _written(module: cst.Module, wrappers: tuple[str, ...]) -> str | None:
    """A program written differently; None where that is not possible."""
    for name in wrappers:
        done = WRAPPERS[name](module)
        if done is None or (name in _IMPORTING and "Version" in source(module)):
            return None
        module = cst.parse_module(source(done))
    text = source(module)
    compile(text, "program.py", "exec", dont_inherit=True)
    return text


def _ways(two: bool) -> Iterator[tuple[str, ...]]:
    yield ()
    for first in WRAPPERS:
        yield (first,)
        if two:
            yield from ((first, second) for second in WRAPPERS if second != first)


def _broken() -> Iterator[tuple[str, str, str, int, cst.Module]]:
    for program, text in PROGRAMS.items():
        module = cst.parse_module(text.removeprefix("\n"))
        for code, mutators in MUTATORS.items():
            for mutator in mutators:
                for number, made in enumerate(mutator(module)):
                    yield code, program, mutator.__name__, number, made


def mistakes(two: bool = False) -> Iterator[Mistake]:
    """Every mistake in every way; with two ways at once it is some tens of thousands."""
    for code, program, mutator, number, made in _broken():
        for way in _ways(two):
            text = _written(made, way)
            if text is not None:
                yield Mistake(code, program, mutator, number, way, text)


def sample(seed: int, for_each: int) -> Iterator[Mistake]:
    """For each rule some of its mistakes, written in none, one or two other ways."""
    chance = random.Random(seed)
    made: dict[str, list[tuple[str, str, int, cst.Module]]] = {}
    for code, *rest in _broken():
        made.setdefault(code, []).append((*rest,))  # type: ignore[arg-type]
    for code, places in sorted(made.items()):
        for _ in range(for_each):
            program, mutator, number, module = chance.choice(places)
            count = chance.choice((0, 1, 1, 2))
            for _ in range(20):  # not every program can be written in every way
                way = tuple(chance.sample(sorted(WRAPPERS), count))
                text = _written(module, way)
                if text is not None:
                    yield Mistake(code, program, mutator, number, way, text)
                    break


def correct(two: bool = False) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Every program as it stands and written differently, without a mistake."""
    for program, text in PROGRAMS.items():
        module = cst.parse_module(text.removeprefix("\n"))
        for way in _ways(two):
            written = _written(module, way)
            if written is not None:
                yield program, way, written


def alarms(text: str, settings: Settings | None = None) -> list[str]:
    """What the rules that are on say about a program."""
    settings = settings or Settings()
    found = check(decode(text.encode()), "program.py", settings).findings
    return [f"{finding.code} {finding.message}" for finding in found]


def is_found(mistake: Mistake) -> bool:
    """Whether the rule finds its mistake."""
    return bool(alarms(mistake.text, Settings(codes=frozenset({mistake.code}))))


def table(counts: dict[str, Counter[bool]]) -> str:
    """Found and made, by rule and in all."""
    total = sum(counts.values(), Counter[bool]())
    rows = [*sorted(counts.items()), ("all", total)]
    lines = [f"{'rule':8}{'found':>8}{'made':>8}{'share':>8}"]
    lines += [f"{code:8}{c[True]:8}{c.total():8}{c[True] / c.total():8.1%}" for code, c in rows]
    return "\n".join(lines)


assert all(group.__name__ for group in _GROUPS)
