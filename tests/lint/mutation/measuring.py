"""Count the mistakes that the checker finds: each program with each mistake, unchanged and written differently.

Invariants: every mistake is looked for by its own rule alone; what is counted is valid Python; the same seed gives the
same sample.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import libcst as cst

from precast_lint.checking.engine import check
from precast_lint.parsing.text import decode
from precast_lint.selecting.settings import LintSettings
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


@cache
def _parsed() -> dict[str, cst.Module]:
    return {name: cst.parse_module(text.removeprefix("\n")) for name, text in PROGRAMS.items()}


def _broken(code: str) -> Iterator[tuple[str, str, int, cst.Module]]:
    for program, module in _parsed().items():
        for mutator in MUTATORS[code]:
            for number, made in enumerate(mutator(module)):
                yield program, mutator.__name__, number, made


def mistakes(code: str, two: bool = False) -> Iterator[Mistake]:
    """Every mistake of a rule in every way; with two ways at once all rules have some tens of thousands."""
    for program, mutator, number, made in _broken(code):
        for way in _ways(two):
            text = _written(made, way)
            if text is not None:
                yield Mistake(code, program, mutator, number, way, text)


def sample(code: str, seed: int, size: int) -> list[Mistake]:
    """Different mistakes of a rule, written in none, one or two other ways: so many, or as many as it has.

    What is drawn depends on the rule and the seed alone: a new rule leaves the samples of the others as they are.
    """
    chance = random.Random(f"{code} {seed}")
    places = list(_broken(code))
    draws: dict[str, Mistake] = {}
    for _ in range(
        10 * size
    ):  # not every program can be written in every way, and some are drawn again
        if len(draws) == size:
            break
        program, mutator, number, module = chance.choice(places)
        way = tuple(chance.sample(sorted(WRAPPERS), chance.choice((0, 1, 1, 2))))
        text = _written(module, way)
        if text is not None:
            draws.setdefault(text, Mistake(code, program, mutator, number, way, text))
    return list(draws.values())


def correct(two: bool = False) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Every program as it stands and written differently, without a mistake."""
    for program, text in PROGRAMS.items():
        module = cst.parse_module(text.removeprefix("\n"))
        for way in _ways(two):
            contents = _written(module, way)
            if contents is not None:
                yield program, way, contents


def alarms(text: str, settings: LintSettings | None = None) -> list[str]:
    """Return the findings of the selected rules in a program."""
    settings = settings or LintSettings()
    result = check(decode(text.encode()), "program.py", settings).findings
    return [f"{finding.code} {finding.message}" for finding in result]


def is_found(mistake: Mistake) -> bool:
    """Return True if the rule finds its mistake."""
    return bool(alarms(mistake.text, LintSettings(codes=frozenset({mistake.code}))))


def table(counts: dict[str, Counter[bool]]) -> str:
    """Found and made, by rule and in all."""
    total = sum(counts.values(), Counter[bool]())
    rows = [*sorted(counts.items()), ("all", total)]
    lines = [f"{'rule':8}{'found':>8}{'made':>8}{'share':>8}"]
    lines += [f"{code:8}{c[True]:8}{c.total():8}{c[True] / c.total():8.1%}" for code, c in rows]
    return "\n".join(lines)


assert all(group.__name__ for group in _GROUPS)
