"""Patterns of modules' names: steps that are counted, not timed, and many patterns at once."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from precast.policy import patterns
from precast.policy.module_plan import plan
from precast.policy.patterns import PatternIndex
from precast.policy.policy import Policy


def matches(pattern: str, name: str) -> bool:
    return PatternIndex([pattern]).matching(name) == [pattern]


def steps(call: Callable[[], object]) -> int:
    """The lines of the matcher that a call runs; what `fnmatch` does in one of them is timed below."""
    count = 0

    def line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "line"
        return line if frame.f_code.co_filename == patterns.__file__ else None

    before = sys.gettrace()
    sys.settrace(line)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


HARD: dict[str, Callable[[int], tuple[str, str]]] = {
    "stars in a component": lambda n: ("*a" * n + "*b", "a" * n),
    "one star after another": lambda n: ("a*" * n + "c", "a" * n + "b"),
    "components": lambda n: (".".join(["**"] * n + ["b"]), ".".join("a" * n)),
    "components between": lambda n: (".".join(["**", "a"] * n + ["b"]), ".".join("a" * n)),
    "both": lambda n: (".".join(["**", "*a*a*b"] * n), ".".join(["aaaa"] * n)),
    "an end that nearly fits": lambda n: ("*" + "a" * n + "b", "a" * 2 * n),
}


@pytest.mark.parametrize("hard", HARD)
def test_matching_takes_no_more_than_pattern_times_name(hard: str) -> None:
    for n in (4, 8, 64, 256):
        pattern, name = HARD[hard](n)
        taken = steps(lambda p=pattern, m=name: matches(p, m))  # type: ignore[misc]
        assert taken <= 8 * (len(pattern) + 1) * (len(name) + 1) + 100


def test_a_component_that_is_hard_to_match_takes_no_more() -> None:
    """Trying all ways to divide such a name among the stars would never end."""
    for pattern, name in (
        HARD[hard](2000) for hard in ("stars in a component", "one star after another")
    ):
        began = time.perf_counter()
        assert not matches(pattern, name)
        assert time.perf_counter() - began < 1e-6 * len(pattern) * len(name)


@pytest.mark.parametrize("hard", HARD)
def test_many_hard_patterns_at_once_take_no_more(hard: str) -> None:
    made = [HARD[hard](n) for n in (8, 32, 64)]
    index, name = PatternIndex(pattern for pattern, _ in made), made[-1][1]
    letters = sum(len(pattern) + 1 for pattern, _ in made)
    assert steps(lambda: index.matching(name)) <= 40 * letters * (len(name) + 1)


parts = st.text("ab*", min_size=1, max_size=4).map(lambda text: "**" if "**" in text else text)
globs = st.lists(parts, max_size=4).map(".".join)
names = st.lists(st.text("abc", min_size=1, max_size=4), max_size=4).map(".".join)


@given(st.lists(globs, unique=True, max_size=30), names)
def test_an_index_finds_what_each_pattern_matches(many: list[str], name: str) -> None:
    assert PatternIndex(many).matching(name) == [p for p in many if matches(p, name)]


@given(st.lists(globs, unique=True, max_size=10), names)
def test_an_index_finds_it_along_a_name(many: list[str], name: str) -> None:
    components = name.split(".") if name else []
    around = [".".join(components[:depth]) for depth in range(len(components) + 1)]
    index = PatternIndex(many)
    assert list(index.along(name)) == [index.matching(outer) for outer in around]


KINDS: dict[str, Callable[[int], str]] = {
    "names": lambda n: f"layer{n}.x",
    "others' names": lambda n: f"other{n}",
    "below anything": lambda n: f"**.x{n}",
    "in a part": lambda n: f"*yer{n}q*",
    "at the end": lambda n: f"layer*.y{n}",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_takes_as_long_among_many_patterns_as_among_few(kind: str) -> None:
    few, many = (PatternIndex(map(KINDS[kind], range(n))) for n in (50, 5000))
    name = "layer7.x.y7"
    assert steps(lambda: many.matching(name)) <= 2 * steps(lambda: few.matching(name)) + 50


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
