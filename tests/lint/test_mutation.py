"""Correct programs, broken in every way that the catalogue names: the rules find it, and are quiet where nothing is.

Of each rule a sample is looked at, and each rule has to find its share; `python -m tests.lint.mutation` counts all, and
`PRECAST_MUTATION_SEED` takes other samples.
"""

from __future__ import annotations

import os
import random

import pytest

from precast_lint.selecting.registry import index
from tests.lint.mutation.measuring import alarms, correct, is_found, sample
from tests.lint.mutation.registry import MUTATORS

SEED = int(os.environ.get("PRECAST_MUTATION_SEED", "0"))
SIZE, QUIET = 20, 80  # one of 20 may be missed: 95%
SHARE = 0.95


@pytest.mark.parametrize("code", sorted(MUTATORS))
def test_a_rule_finds_its_mistakes_however_they_are_written(code: str) -> None:
    mistakes = sample(code, SEED, SIZE)
    missed = [mistake for mistake in mistakes if not is_found(mistake)]
    assert mistakes
    result = len(mistakes) - len(missed)
    assert result >= SHARE * len(mistakes), "\n".join(map(str, [*missed, missed[0].text]))


def test_correct_programs_are_quiet_however_they_are_written() -> None:
    programs = list(correct())
    for program, way, text in random.Random(SEED).sample(programs, QUIET):
        assert alarms(text) == [], f"{program}, {' + '.join(way)}\n{text}"


def test_every_rule_has_mistakes_of_its_own() -> None:
    assert MUTATORS.keys() == index().keys()
