"""Rules for modules in a policy: names and patterns, files, what one rule and what nested rules say."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precast.errors import PolicyError
from precast.policy.module_rules import ModuleRule, decide, parse_module_rule
from precast.policy.patterns import PatternIndex, check_pattern
from precast.policy.policy import Policy, Precision, Rule, module_context

TORCH = Policy.load("torch")

FILE = """
base = "torch"
[modules]
"*.lm_head" = "fp32"
"encoder.**" = "float16"
"decoder.*.attn.softmax" = { dtype = "bfloat16", ops = { softmax = "lower" }, reason = "measured" }
"rows" = { ops = { "softmax.int" = { rule = "keep", reason = "small" } } }
"""


def load(folder: Path, text: str, name: str = "mine.toml") -> Policy:
    (folder / name).write_text(text, encoding="utf-8")
    return Policy.load(folder / name)


# --- patterns ---


def by_components(pattern: Sequence[str], name: Sequence[str]) -> bool:
    """The meaning of a pattern, written another way: component by component, from the left."""
    if not pattern:
        return not name
    first, rest = pattern[0], pattern[1:]
    if first == "**":
        return any(by_components(rest, name[taken:]) for taken in range(len(name) + 1))
    return bool(name) and by_letters(first, name[0]) and by_components(rest, name[1:])


def by_letters(pattern: str, text: str) -> bool:
    if not pattern:
        return not text
    if pattern[0] == "*":
        return any(by_letters(pattern[1:], text[taken:]) for taken in range(len(text) + 1))
    return bool(text) and text[0] == pattern[0] and by_letters(pattern[1:], text[1:])


def matches(pattern: str, name: str) -> bool:
    return PatternIndex([pattern]).matching(name) == [pattern]


letters = st.text("ab+\n", min_size=1, max_size=3)
names = st.lists(letters, max_size=4)
patterns = st.lists(
    st.one_of(st.just("**"), st.text("ab+\n*", min_size=1, max_size=3)), max_size=4
).filter(lambda parts: all("**" not in part or part == "**" for part in parts))


@given(patterns, names)
def test_a_pattern_matches_what_its_components_match(pattern: list[str], name: list[str]) -> None:
    assert check_pattern(".".join(pattern), "here") == ".".join(pattern)
    meant = ["**", *pattern[1:]] if pattern[:1] == ["*"] and pattern[1:] else pattern
    assert matches(".".join(pattern), ".".join(name)) is by_components(meant, name)


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("", [""], ["a"]),
        ("**", ["", "a", "a.b"], []),
        ("*", ["a"], ["", "a.b"]),
        ("*.lm_head", ["lm_head", "model.lm_head", "a.b.lm_head"], ["", "model.lm_heads"]),
        ("*.layers.*.attn", ["layers.0.attn", "a.b.layers.1.attn"], ["layers.attn"]),
        ("a.*.b", ["a.x.b"], ["a.b", "a.x.y.b"]),
        ("**.lm_head", ["lm_head", "model.lm_head", "a.b.lm_head"], ["lm_head.out"]),
        ("encoder.**", ["encoder", "encoder.0", "encoder.0.attn"], ["encoders", ""]),
        ("layer*.norm", ["layer1.norm", "layer.norm"], ["layer1.2.norm"]),
        ("a.**.b", ["a.b", "a.x.b", "a.x.y.b"], ["a", "b"]),
        ("a+", ["a+"], ["aa"]),
    ],
)
def test_what_a_pattern_matches(pattern: str, yes: list[str], no: list[str]) -> None:
    assert [name for name in yes if not matches(pattern, name)] == []
    assert [name for name in no if matches(pattern, name)] == []


@pytest.mark.parametrize("pattern", ["a..b", ".a", "a.", "a.b**", "***", "layers.[0-3]", "a?", 3])
def test_a_pattern_that_cannot_match_is_refused(pattern: object) -> None:
    with pytest.raises(PolicyError, match="Write names with dots"):
        TORCH.replace(modules={pattern: "fp32"})  # type: ignore[dict-item]
    with pytest.raises(PolicyError, match="Write names with dots"):
        Policy("p", {}, modules={pattern: ModuleRule(Precision.FP32)})  # type: ignore[dict-item]


def find(rules: dict[str, ModuleRule], name: str) -> object:
    return decide(PatternIndex(rules).matching(name), rules, name)


def test_an_exact_name_beats_globs_and_globs_must_agree() -> None:
    rules = {
        name: parse_module_rule(value, name)
        for name, value in {"a.*": "fp32", "**": "lower", "a.b": "keep", "*.c": "fp32"}.items()
    }
    assert find(rules, "a.b") == ("a.b", rules["a.b"])
    assert find(rules, "x") == ("**", rules["**"])
    with pytest.raises(PolicyError, match=r"'a\.\*' says fp32, '\*\*' says lower.*'a\.c'"):
        find(rules, "a.c")
    del rules["**"]
    assert find(rules, "a.c") == ("a.*", rules["a.*"]), "both say the same"
    assert find(rules, "d") is None


# --- files and values ---


def test_a_file_says_rules_for_modules(tmp_path: Path) -> None:
    modules = load(tmp_path, FILE).modules
    assert list(modules) == ["*.lm_head", "encoder.**", "decoder.*.attn.softmax", "rows"]
    assert modules["*.lm_head"] == ModuleRule(Precision.FP32)
    rule = modules["decoder.*.attn.softmax"]
    assert (rule.dtype, rule.reason, str(rule)) == (
        "bfloat16",
        "measured",
        "bfloat16 with softmax = lower",
    )
    assert modules["rows"].dtype is None
    assert modules["rows"].ops["aten::softmax.int"].rule is Rule.KEEP
    assert "mine.toml: [modules] '*.lm_head'" in modules["*.lm_head"].origin


def test_a_pattern_replaces_the_same_one_of_the_base(tmp_path: Path) -> None:
    load(tmp_path, FILE, "base.toml")
    policy = load(tmp_path, 'base = "base.toml"\n[modules]\n"*.lm_head" = "keep"\nx = "lower"\n')
    assert policy.modules["*.lm_head"].dtype == "keep"
    assert len(policy.modules) == 5


def test_dump_load_pickle_replace_and_equality_know_modules(tmp_path: Path) -> None:
    policy = load(tmp_path, FILE)
    policy.save(tmp_path / "again.toml")
    again = Policy.load(tmp_path / "again.toml")
    assert again == policy
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert hash(again.modules["rows"]) == hash(policy.modules["rows"])
    other = policy.replace(modules={"encoder.**": None, "x": {"dtype": "fp32", "reason": "so"}})
    assert other != policy
    assert [*other.modules] == ["*.lm_head", "decoder.*.attn.softmax", "rows", "x"]
    assert policy.replace(name="n").modules == policy.modules
    assert policy.retarget().modules == policy.modules
    assert "4 rules for modules" in repr(policy)
    assert other.fingerprint == policy.fingerprint, "regions do not look at rules for modules"
    with pytest.raises(TypeError):
        policy.modules["x"] = policy.modules["rows"]  # type: ignore[index]


FILE_ERRORS = {
    "modules that is no table": ("modules = 3\n", ["modules is 3", "[modules]"]),
    "a dtype that is none": ('[modules]\na = "fp17"\n', ["'a'", "'fp17'", "did you mean float16"]),
    "a number": ("[modules]\na = 16\n", ["[modules] 'a'", "16 is not a precision of a module"]),
    "a list": ("[modules]\na = []\n", ["[] is not a precision"]),
    "dots without quotes": ('[modules]\na.b = "fp32"\n', ["'b' is not allowed", "needs quotes"]),
    "nothing said": ('[modules]\na = { reason = "x" }\n', ["it has neither dtype nor ops"]),
    "a pattern": ('[modules]\n"a..b" = "fp32"\n', ["'a..b' has an empty component"]),
    "an unknown operation": (
        '[modules]\na = { ops = { layernorm = "lower" } }\n',
        ["[modules] 'a' ops layernorm", "layer_norm"],
    ),
    "an unknown rule": ('[modules]\na = { ops = { exp = "lowr" } }\n', ["'lowr'", "lower"]),
    "ops that is no table": ("[modules]\na = { ops = 3 }\n", ["ops is 3"]),
    "ops that never act": (
        '[modules]\na = { dtype = "fp32", ops = { exp = "lower" } }\n',
        ["ops would never act with dtype 'fp32'"],
    ),
    "a reason that is no text": (
        '[modules]\na = { dtype = "fp32", reason = 3 }\n',
        ["reason is 3"],
    ),
}


@pytest.mark.parametrize(("text", "parts"), FILE_ERRORS.values(), ids=FILE_ERRORS.keys())
def test_a_bad_rule_gets_one_error_that_says_where(
    tmp_path: Path, text: str, parts: list[str]
) -> None:
    with pytest.raises(PolicyError) as error:
        load(tmp_path, text)
    assert [part for part in ("mine.toml", *parts) if part not in str(error.value)] == []


def test_rows_for_other_versions_are_as_if_not_written() -> None:
    rows = {"no_such": {"rule": "fp32", "until": "2.0"}, "exp": "lower"}
    rule = TORCH.replace(modules={"a": {"ops": rows}}).modules["a"]
    assert list(rule.ops) == ["aten::exp"]


# --- what holds inside ---


def test_rules_nest_from_outer_to_inner() -> None:
    policy = TORCH.replace(
        modules={
            "encoder.**": "float16",
            "encoder.norm": "fp32",
            "encoder.norm.in": {"dtype": "lower", "ops": {"exp": "lower"}},
            "encoder.mlp": "keep",
            "rows": {"ops": {"linear": "fp32"}},
        }
    )
    assert module_context(policy, "") == module_context(policy, "decoder.0")
    assert module_context(policy, "decoder").precision == "lower"
    assert module_context(policy, "encoder.mlp").precision == "float16"
    assert module_context(policy, "encoder.norm").precision == "fp32"
    inner = module_context(policy, "encoder.norm.in")
    assert (inner.precision, list(inner.ops)) == ("float16", ["aten::exp"])
    assert inner.sources[-1] == ("encoder.norm.in", "encoder.norm.in")
    assert module_context(policy, "rows.0").ops["aten::linear"].rule is Rule.FP32


def test_resolve_knows_the_module() -> None:
    policy = TORCH.replace(
        modules={"*.head": "fp32", "enc": "float16", "rows": {"ops": {"linear": "keep"}}}
    )
    assert policy.resolve("linear", "cpu", module="x") == policy.resolve("linear", "cpu")
    rule, reason = policy.resolve("linear", "cpu", module="m.head.out")
    assert rule is Rule.KEEP
    assert "autocast is off" in reason
    assert "'*.head' for 'm.head'" in reason
    rule, reason = policy.resolve("linear", "cuda", module="enc.0")
    assert rule is Rule.LOWER
    assert "to float16 ([modules] 'enc' for 'enc')" in reason
    assert policy.resolve("linear", "cpu", module="rows").rule is Rule.KEEP
    assert policy.resolve("linear", "cpu").rule is Rule.LOWER
    with pytest.raises(PolicyError, match="no operation aten::linera"):
        policy.resolve("linera", "cpu", module="m.head")
