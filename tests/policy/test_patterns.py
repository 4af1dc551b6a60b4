"""Patterns of modules' names."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from precast.policy.module_plan import plan
from precast.policy.patterns import PatternIndex
from precast.policy.policy import Policy


def matches(pattern: str, name: str) -> bool:
    return PatternIndex([pattern]).matching(name) == [pattern]


HARD = (("*a" * 2000 + "*b", "a" * 2000), ("a*" * 2000 + "c", "a" * 2000 + "b"))


def test_a_component_that_is_hard_to_match_takes_no_more() -> None:
    """Trying all ways to divide such a name among the stars would never end."""
    for pattern, name in HARD:
        began = time.perf_counter()
        assert not matches(pattern, name)
        assert time.perf_counter() - began < 1e-6 * len(pattern) * len(name)


parts = st.text("ab*", min_size=1, max_size=4).map(lambda text: "**" if "**" in text else text)
globs = st.lists(parts, max_size=4).map(".".join)
names = st.lists(st.text("abc", min_size=1, max_size=4), max_size=4).map(".".join)


@given(globs, names)
def test_a_pattern_matches_as_a_regular_expression_does(pattern: str, name: str) -> None:
    text = "".join(
        r"([^.]+\.)*" if part == "**" else part.replace("*", "[^.]*") + r"\."
        for part in re.sub(r"^\*\.", "**.", pattern).split(".")
        if pattern
    )
    assert matches(pattern, name) == bool(re.fullmatch(text, f"{name}." if name else ""))


@given(st.lists(globs, unique=True, max_size=30), names)
def test_an_index_finds_what_each_pattern_matches(many: list[str], name: str) -> None:
    assert PatternIndex(many).matching(name) == [p for p in many if matches(p, name)]


def test_a_plan_of_many_rules_says_the_same_as_rule_by_rule() -> None:
    model = nn.Sequential(*(nn.ModuleDict({"attn": nn.Linear(1, 1)}) for _ in range(20)))
    rules = [f"{n}.attn" for n in range(0, 400, 2)] + [f"{n}.*" for n in range(1, 400, 2)]
    policy = Policy.load("torch").replace(modules=dict.fromkeys(rules, "fp32"))
    planned = plan(model, policy)
    assert {m.name for m in planned.modules if m.rule} == {f"{n}.attn" for n in range(20)}
    assert set(planned.unmatched) == {rule for rule in rules if int(rule.split(".")[0]) >= 20}


def test_of_many_patterns_that_match_nothing_the_first_are_told_each() -> None:
    policy = Policy.load("torch").replace(modules={f"lyer{n}": "fp32" for n in range(1000)})
    complaints = plan(nn.ModuleDict({"layer0": nn.Linear(1, 1)}), policy).complaints()
    assert len(complaints) == 11
    assert "'lyer0' matches no module of the model; did you mean layer0?" in complaints[0]
    assert complaints[-1].startswith(
        "[modules] 990 more patterns match no module of the model: 'lyer10'"
    )


@pytest.mark.parametrize(
    ("pattern", "suggestion"),
    [
        ("q_proj", "did you mean '*.q_proj', which matches 'layers.0.q_proj' and 1 more?"),
        ("layers.*.q_prj", "layers.1.q_proj or layers.0.q_proj or layers.1?"),
        ("*.some.thing.q_prj", "did you mean q_proj?"),
        ("xyz", "matches no module of the model."),
    ],
)
def test_a_pattern_that_matches_nothing_gets_the_nearest(pattern: str, suggestion: str) -> None:
    layers = [nn.ModuleDict({"q_proj": nn.Linear(1, 1)}) for _ in range(2)]
    model = nn.ModuleDict({"layers": nn.ModuleList(layers)})
    policy = Policy.load("torch").replace(modules={pattern: "fp32"})
    [complaint] = plan(model, policy).complaints()
    assert complaint.endswith(suggestion)
