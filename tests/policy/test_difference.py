"""`precast explain --diff`: which rules differ, and that what is said of dtypes is what operations then do."""

from __future__ import annotations

import io
import itertools
import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

import precast
from precast.cli.main import main
from precast.errors import PolicyError
from precast.policy.difference import PolicyDifference, explain_difference
from precast.policy.policy import Policy

UP_FROM_16 = "With 16-bit arguments it computes in float32 instead of 16 bits"
DOWN_FROM_32_IN_16 = "With 16-bit arguments it computes in 16 bits instead of float32"
DOWN = "With float32 arguments it computes in 16 bits instead of float32"
UP = "With float32 arguments it computes in float32 instead of 16 bits"


def printed(found: PolicyDifference) -> str:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(found.render())
    return console.export_text()


def test_what_pytorch_changed_between_two_releases() -> None:
    found = explain_difference("torch@2.11", "torch@2.12")
    (change,) = found.changes
    assert change.operations == ("rms_norm",)
    assert change.devices == ("cuda", "xpu", "mtia", "maia")
    assert (change.before, change.after) == ("no rule", "fp32")
    assert change.meaning[0].startswith(UP_FROM_16)
    assert "four bytes an element instead of two" in change.meaning[0]
    assert "Copies in float32 stay in memory if backward needs them" in change.meaning[1]
    assert (found.mixed, found.modules) == (None, ())
    text = printed(found)
    assert text.startswith("From torch@2.11 to torch@2.12\n  1 operation: no rule -> fp32")
    assert "on cuda, xpu, mtia, maia: no rule -> fp32" in text


def test_the_other_way_round_is_the_opposite() -> None:
    (change,) = explain_difference("torch@2.12", "torch@2.11").changes
    assert (change.before, change.after) == ("fp32", "no rule")
    assert change.meaning[0].startswith(DOWN_FROM_32_IN_16)


def test_releases_are_compared_whole_whatever_is_installed() -> None:
    found = explain_difference("torch@2.13", "torch@2.14")
    gone, new = sorted(found.changes, key=lambda change: change.after, reverse=True)
    assert set(gone.operations) == {"cholesky", "qr"}
    assert (gone.devices, gone.before, gone.after) == (("cpu",), "fp32", "no rule")
    assert new.operations == ("linalg_matrix_sqrth",)
    assert {"cpu", "cuda"} <= set(new.devices)


def test_policies_that_do_the_same_have_no_difference(tmp_path: Path) -> None:
    for first, second in (("torch", "torch"), ("torch@2.12", "torch@2.13")):
        found = explain_difference(first, second)
        assert not found
        assert printed(found).strip() == f"{first} and {second} have the same rules."
    (tmp_path / "other.toml").write_text('name = "other"\nbase = "torch"\n')
    assert not explain_difference("torch", tmp_path / "other.toml")


def test_files_mixed_dtypes_and_modules(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        'base = "default"\n[ops.cpu]\nlinear = "keep"\n[modules]\n"**.head" = "fp32"\nbody = "lower"\n'
    )
    base = Policy.load("torch").replace(modules={"body": "lower", "tail": "fp32"})
    found = explain_difference(base, tmp_path / "mine.toml")
    assert found.mixed == ("raise", "promote")
    by_pattern = {change.pattern: (change.before, change.after) for change in found.modules}
    assert by_pattern == {"**.head": ("no rule", "fp32"), "tail": ("fp32", "no rule")}
    linear = next(change for change in found.changes if "linear" in change.operations)
    assert (linear.devices, linear.before, linear.after) == (("cpu",), "lower", "keep")
    assert linear.meaning[0].startswith(UP)
    text = printed(found)
    assert "mixed dtypes\n  raise -> promote" in text
    assert "modules '**.head'\n  no rule -> fp32" in text


def test_some_overloads_are_named_one_by_one() -> None:
    policy = Policy.load("torch").replace(ops={"cpu": {"sum.dim_IntList": "fp32"}})
    (change,) = explain_difference("torch", policy).changes
    assert change.operations == ("sum.dim_IntList",)
    policy = Policy.load("torch").replace(ops={"cpu": {"sum": "fp32", "my::op": "lower"}})
    changes = explain_difference("torch", policy).changes
    assert sorted(change.operations for change in changes) == [("my::op",), ("sum",)]
    assert (next(c for c in changes if c.operations == ("my::op",)).before) == "no rule"


def test_what_was_refused_and_what_is() -> None:
    change = next(
        change
        for change in explain_difference("torch", "default").changes
        if "binary_cross_entropy" in change.operations and change.before == "banned"
    )
    assert change.meaning == ("It was refused, and now runs.",)


RULES = {
    "exp": ("lower", "fp32", "promote", "keep", None),
    "cumsum": ("lower", "fp32", "fp32_set_dtype", "promote", "keep", "fallthrough", None),
    "norm.Scalar": ("lower", "fp32", "fp32_append_dtype", "keep", None),
}
CALLS = {
    "exp": torch.exp,
    "cumsum": lambda x: x.cumsum(0),
    "norm.Scalar": torch.ops.aten.norm.Scalar,
}


@pytest.mark.parametrize(
    ("name", "was", "now"),
    [(name, *pair) for name, rules in RULES.items() for pair in itertools.permutations(rules, 2)],
)
def test_what_is_said_of_dtypes_is_what_the_operation_does(
    name: str, was: str | None, now: str | None
) -> None:
    before, after = (
        Policy("p", {}).replace(ops={name: rule} if rule else {}) for rule in (was, now)
    )
    (change,) = explain_difference(before, after).changes
    said = " ".join(change.meaning)
    low, high = (
        tuple(result_of(name, policy, dtype) for policy in (before, after))
        for dtype in (torch.bfloat16, torch.float32)
    )
    both = torch.bfloat16, torch.float32
    assert (UP_FROM_16 in said) == (low == both)
    assert (DOWN_FROM_32_IN_16 in said) == (low == both[::-1])
    assert (DOWN in said) == (high == both[::-1])
    assert (UP in said) == (high == both)
    assert said


def result_of(name: str, policy: Policy, dtype: torch.dtype) -> torch.dtype:
    x = torch.ones(4, dtype=dtype)
    with precast.autocast("cpu", torch.bfloat16, policy=policy):
        found = CALLS[name](x) if name != "norm.Scalar" else CALLS[name](x, 2)
    assert isinstance(found, torch.Tensor)
    return found.dtype


# --- on the command line ---


def test_the_exit_code_says_whether_they_differ() -> None:
    runner = CliRunner()
    done = runner.invoke(main, ["explain", "--diff", "torch@2.11", "torch@2.12"])
    assert done.exit_code == 1
    assert "rms_norm" in done.stdout
    done = runner.invoke(main, ["explain", "--diff", "torch@2.12", "torch@2.13"])
    assert (done.exit_code, done.stdout) == (0, "torch@2.12 and torch@2.13 have the same rules.\n")


def test_json_has_all_of_it() -> None:
    done = CliRunner().invoke(main, ["explain", "--diff", "torch@2.11", "torch@2.12", "--json"])
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert found == explain_difference("torch@2.11", "torch@2.12").to_dict()
    assert found["equal"] is False
    assert found["changes"][0]["operations"] == ["rms_norm"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--diff", "torch@2.11"),
        ("--diff", "torch", "torch@1.0"),
        ("--diff", "torch", "no.toml"),
        ("--diff", "torch", "lean", "softmax"),
        ("--diff", "torch", "lean", "--device", "cpu"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_asked_is_exit_code_2(arguments: tuple[str, ...]) -> None:
    done = CliRunner().invoke(main, ["explain", *arguments])
    assert done.exit_code == 2
    assert "Error: " in done.output


def test_a_policy_that_is_not_there() -> None:
    with pytest.raises(PolicyError, match=r"Allowed: torch@2\.11"):
        explain_difference("torch", "torch@3.0")


@pytest.mark.parametrize(
    ("was", "now", "says"),
    [
        ("lower", "float8_rowwise", "Now: matrices are multiplied in 8 bits, with a scale a row"),
        ("float8", "lower", "Before: matrices are multiplied in 8 bits, with one scale a matrix"),
        ("float8", "float8_pow2", "a power of two. Before: matrices are multiplied in 8 bits"),
        ("fp32", "float8", "With 16-bit arguments it computes in 16 bits instead of float32"),
    ],
)
def test_a_rule_of_8_bits_is_said_as_one(was: str, now: str, says: str) -> None:
    default = Policy.load("default")
    found = explain_difference(*(default.replace(ops={"linear": rule}) for rule in (was, now)))
    text = " ".join(printed(found).split())
    assert says in text
    assert "autocast is off in what it calls" not in text
