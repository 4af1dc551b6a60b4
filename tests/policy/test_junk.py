"""Whatever a policy is given, it is a policy or one `PolicyError` that says where: values and files of every kind."""

from __future__ import annotations

import datetime
import os
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from precast.errors import OutputError, PolicyError
from precast.policy.policy import (
    Entry,
    ModuleRule,
    Policy,
    Precision,
    Rule,
    expanded_rules,
    module_context,
)
from precast.policy.values import shown

TORCH = Policy.load("torch")


def deep(depth: int) -> list[Any]:
    """A list in a list in a list ..."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


class NoRepr:
    def __repr__(self) -> str:
        raise OSError("no repr")


class NoPath:
    def __fspath__(self) -> str:
        raise KeyError("no path")


class BytesPath:
    def __fspath__(self) -> bytes:
        return b"torch"


VALUES = [
    *(None, True, -1, 10**5000, float("nan"), 1j, "", "lower", "fp32", "cpu", "linear", "\ud800"),
    *("\0", "a" * 5000, "*a" * 200, "**." * 500 + "b", "é.ü", ".", b"torch", (), [], {}, set()),
    *({"rule": "lower"}, {"rule": []}, {"dtype": 3}, {"ops": 7}, {"ops": {3: 4}}, {3: 4}),
    *({"rule": "keep", "since": "9" * 5000 + ".1"}, {"rule": "keep", "builds": np.ones(2)}),
    *({"cpu": {"linear": "fp32"}}, {"cpu": 3}, {"head": "fp32"}, {"a..b": "fp32"}),
    *(object, object(), len, NoRepr(), NoPath(), BytesPath(), Path("nothing"), Path("x" * 5000)),
    *(torch.ones(2), np.ones(3), datetime.date(2026, 1, 1), Rule.LOWER, Precision.FP32, TORCH),
    *(Entry(Rule.KEEP), ModuleRule(None), deep(100_000), os.curdir, range(3), slice(1)),
]
junk = st.one_of(
    st.sampled_from(range(len(VALUES))).map(VALUES.__getitem__),
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary()),
        lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
        max_leaves=8,
    ),
)


def refused_or_done(call: Callable[[], object]) -> None:
    """That a call works, or raises the one error there is, with a message that can be read."""
    said = "done"
    try:
        call()
    except PolicyError as error:
        said = str(error)
    assert 0 < len(said) < 5000


PARTS: dict[str, Callable[[Any], object]] = {
    "load": Policy.load,
    "save": TORCH.save,
    "replace name": lambda x: TORCH.replace(name=x).text,
    "replace ops": lambda x: TORCH.replace(ops=x).text,
    "replace a rule": lambda x: TORCH.replace(ops={"linear": x}).text,
    "replace a device": lambda x: TORCH.replace(ops={"cuda": x}).text,
    "replace mixed": lambda x: TORCH.replace(mixed=x).text,
    "replace modules": lambda x: TORCH.replace(modules=x).text,
    "replace a module": lambda x: TORCH.replace(modules={"head": x}).text,
    "replace ops of a module": lambda x: TORCH.replace(modules={"head": {"ops": x}}).text,
    "resolve an operation": lambda x: TORCH.resolve(x, "cpu"),
    "resolve on a device": lambda x: TORCH.resolve("linear", x),
    "resolve in a module": lambda x: TORCH.replace(modules={"**": "fp32"}).resolve(
        "linear", "cpu", module=x
    ),
    "retarget": TORCH.retarget,
    "retarget like": lambda x: TORCH.retarget("cpu", like=x),
    "rules": TORCH.rules,
    "expand": lambda x: expanded_rules(TORCH, x),
    "inside": lambda x: module_context(TORCH, x),
    "a name": lambda x: Policy(x, {}).text,
    "tables": lambda x: Policy("p", x).text,
    "a table": lambda x: Policy("p", {"cpu": x}).text,
    "an entry": lambda x: Policy("p", {"cpu": {"aten::linear": x}}).text,
    "mixed": lambda x: Policy("p", {}, x).text,
    "a summary": lambda x: Policy("p", {}, "raise", x).text,
    "modules": lambda x: Policy("p", {}, modules=x).text,
    "a module": lambda x: Policy("p", {}, modules={"head": x}).text,
    "Entry": Entry,
    "the reason of an Entry": lambda x: Entry(Rule.KEEP, x, x),
    "the versions of an Entry": lambda x: Entry(Rule.KEEP, "", "", x, x, x),
    "ModuleRule": ModuleRule,
    "the ops of a ModuleRule": lambda x: ModuleRule(None, x),
    "the reason of a ModuleRule": lambda x: ModuleRule(None, {}, x, x),
}


@pytest.mark.parametrize("part", PARTS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(value=junk)
def test_drawn_junk_is_one_error(
    part: str, value: object, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.getbasetemp())
        refused_or_done(lambda: PARTS[part](value))


@pytest.mark.parametrize("part", PARTS)
def test_each_kind_of_junk_is_one_error(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for value in VALUES:
        refused_or_done(lambda value=value: PARTS[part](value))  # type: ignore[misc]


@pytest.mark.parametrize("part", [part for part in PARTS if part.startswith("replace")])
@pytest.mark.parametrize(
    "value", [3, torch.ones(2), NoRepr(), object], ids=lambda v: type(v).__name__
)
def test_a_wrong_type_is_refused_and_named(part: str, value: object) -> None:
    with pytest.raises(PolicyError, match=r"replace|mixed|name"):
        PARTS[part](value)


def test_showing_never_fails_and_is_never_long() -> None:
    for value in VALUES:
        assert 0 < len(shown(value)) < 300
    assert shown("abc") == "'abc'"


# --- files ---


def load(path: Path, text: str) -> Policy:
    path.write_text(text, encoding="utf-8")
    return Policy.load(path)


def lines() -> st.SearchStrategy[str]:
    names = st.sampled_from(
        [
            "name",
            "base",
            "mixed",
            "summary",
            "ops",
            "ops.cpu",
            "modules",
            "ops.linear",
            "ops.x.y",
            "a",
        ]
    )
    plain = st.one_of(
        st.sampled_from(['"torch"', '"lower"', '"raise"', "[]", "{}", "3", "1e400", "nan", "-0"]),
        st.sampled_from(
            ["2026-01-01", "07:32:00", "9" * 5000, "{rule='keep'}", "{ops={exp='keep'}}"]
        ),
        st.sampled_from(["[" * 3000 + "]" * 3000, "{a=" * 2000 + "1" + "}" * 2000, '"\\u0000"']),
        st.text('"\\[]{}=#,x0', max_size=6),
    )
    rows = st.sampled_from(['linear = "fp32"', '"a.*" = "fp32"', '"" = "keep"', "x = x", "exp = 3"])
    return st.one_of(
        st.builds("{} = {}".format, names, plain),
        st.builds("[{}]".format, names),
        rows,
        st.text(max_size=9),
    )


@given(st.lists(lines(), max_size=6))
def test_a_random_file_is_a_policy_or_one_error_with_its_name(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[str]
) -> None:
    path = tmp_path_factory.getbasetemp() / "drawn.toml"
    try:
        name = tomllib.loads(load(path, "\n".join(drawn)).text)["name"]
    except PolicyError as error:
        name = str(error)
    assert "drawn" in name or "name" in "\n".join(drawn)
    assert len(name) < 5000


@pytest.mark.parametrize(
    ("text", "said"),
    {
        "arrays in arrays": ("x = " + "[" * 50_000 + "]" * 50_000, "nested too deep"),
        "tables in tables": ("ops.linear = " + "{a = " * 50_000 + "1" + "}" * 50_000, "too deep"),
        "a key of many parts": ("ops.linear." + ".".join("a" * 900) + " = 1", r"\[ops\] linear"),
        "a number of many digits": ("ops.linear = " + "9" * 6000, "not TOML|linear"),
        "a value of many parts": ("name = [" + "'abc'," * 9999 + "]", "name is"),
        "a long operation": (f"[ops]\n{'a' * 20_000} = 'keep'", "no operation aten::aaa"),
        "a long pattern": (f"[modules]\n'{'a**' * 9000}' = 'fp32'", "has [*][*] beside"),
        "a long base": (f"base = '{'b' * 9000}'", "neither a preset nor a file"),
        "a base with a zero byte": ('base = "b\\u0000"', "neither a preset nor a file"),
    }.values(),
)
def test_a_file_too_deep_or_too_long_gets_one_error_that_says_where(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(PolicyError, match=said) as error:
        load(tmp_path / "p.toml", text)
    assert "p.toml" in str(error.value)
    assert len(str(error.value)) < 5000


def a_chain(folder: Path, length: int, last: str) -> Path:
    for number in range(length):
        text = f'base = "{number + 1}.toml"\n[ops]\nexp = "fp32"\n' if number < length - 1 else last
        (folder / f"{number}.toml").write_text(text)
    return folder / "0.toml"


def test_a_chain_of_bases_has_an_end(tmp_path: Path) -> None:
    policy = Policy.load(a_chain(tmp_path, 30, '[ops]\nmm = "lower"\n'))
    assert policy.resolve("mm", "cpu").rule is Rule.LOWER
    assert policy.resolve("exp", "cpu").rule is Rule.FP32
    with pytest.raises(PolicyError, match=r"32.toml: it is the base of a base ... of 32 files"):
        Policy.load(a_chain(tmp_path, 40, '[ops]\nmm = "lower"\n'))


def test_links_that_lead_back_to_themselves_are_no_file(tmp_path: Path) -> None:
    (tmp_path / "a.toml").symlink_to("b.toml")
    (tmp_path / "b.toml").symlink_to("a.toml")
    with pytest.raises(PolicyError, match="neither a preset nor a file"):
        Policy.load(tmp_path / "a.toml")


@pytest.mark.parametrize("where", ["missing/p.toml", "", "x" * 5000, "a\0b"])
def test_a_file_that_cannot_be_written_is_both_errors(tmp_path: Path, where: str) -> None:
    with pytest.raises(PolicyError, match="cannot write") as error:
        TORCH.save(tmp_path / where)
    assert isinstance(error.value, OutputError)
    assert list(tmp_path.iterdir()) == []
