"""Merged facts describe the same paths as before."""

from __future__ import annotations

import itertools
import random

from precast_lint.training_step.flow_facts import merge_facts


def _meant(facts: int, tests: int) -> set[tuple[bool, ...]]:
    """The worlds in which some facts hold."""
    return {
        world
        for world in itertools.product((True, False), repeat=tests)
        if not any(facts >> 2 * i & (2 if holds else 1) for i, holds in enumerate(world))
    }


def test_merged_facts_describe_the_same_paths() -> None:
    draw = random.Random(0)
    for _ in range(500):
        sides = [
            [draw.choice((0, 1, 2)) << 2 * i for i in range(4)] for _ in range(draw.randint(1, 9))
        ]
        facts = frozenset(sum(side) for side in sides)
        after = merge_facts(facts)
        assert len(after) <= len(facts)
        before_worlds = set[tuple[bool, ...]]().union(*(_meant(one, 4) for one in facts))
        assert set[tuple[bool, ...]]().union(*(_meant(one, 4) for one in after)) == before_worlds


def test_both_sides_of_a_test_are_one_that_knows_nothing_of_it() -> None:
    assert merge_facts(frozenset({0b0101, 0b1001})) == (0b0001,)
    assert merge_facts(frozenset({0b01, 0b0101})) == (0b01,)
