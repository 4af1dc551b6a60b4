"""Correct programs, broken in every way that the catalogue names: the rules find it, and are quiet where nothing is.

A sample is looked at; `python -m tests.lint.mutation` counts all, by rule, and `PRECAST_MUTATION_SEED` takes others.
"""

from __future__ import annotations

import os
import random
from collections import Counter

from precast_lint.selecting.registry import index
from tests.lint.mutation.measuring import alarms, correct, is_found, sample, table
from tests.lint.mutation.registry import MUTATORS

SEED = int(os.environ.get("PRECAST_MUTATION_SEED", "0"))
FOR_EACH, QUIET = 4, 80
SHARE = 0.95


def test_mistakes_are_found_however_they_are_written() -> None:
    counts: dict[str, Counter[bool]] = {}
    missed = []
    for mistake in sample(SEED, FOR_EACH):
        found = is_found(mistake)
        counts.setdefault(mistake.code, Counter())[found] += 1
        if not found:
            missed.append(str(mistake))
    total = sum(counts.values(), Counter[bool]())
    assert total.total() > 150
    assert total[True] >= SHARE * total.total(), "\n".join([table(counts), *missed])


def test_correct_programs_are_quiet_however_they_are_written() -> None:
    programs = list(correct())
    for program, way, text in random.Random(SEED).sample(programs, QUIET):
        assert alarms(text) == [], f"{program}, {' + '.join(way)}\n{text}"


# What they find is no mistake, but a style, or a choice.
NO_MISTAKE = {"AMP406", "AMP501", "AMP502", "AMP504", "AMP601"}


def test_every_rule_has_mistakes_of_its_own() -> None:
    assert MUTATORS.keys() == index().keys() - NO_MISTAKE
