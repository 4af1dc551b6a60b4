"""Policies as values: what they say, what they refuse, and that nothing changes them."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys

import pytest
import torch

import precast
from precast.errors import PolicyError
from precast.policy.policy import (
    DEVICE_TYPES,
    Entry,
    Policy,
    Resolution,
    Rule,
    expanded_rules,
    policy_of,
)


@pytest.fixture
def torch_policy():
    return Policy.load("torch")


# What a policy says


@pytest.mark.parametrize(
    ("op", "device", "rule"),
    [
        ("linear", "cpu", "lower"),
        ("aten::linear", "cuda", "lower"),
        ("softmax.int", "cuda", "fp32_set_dtype"),
        ("softmax.int", "cpu", "keep"),
        ("norm.Scalar", "xpu", "fp32_append_dtype"),
        ("binary_cross_entropy", "cuda", "banned"),
        ("binary_cross_entropy", "cpu", "fp32"),
        ("prod.default", "cpu", "fp32"),
        ("prod.dim_int", "cpu", "fp32"),
        ("prod", "cpu", "fp32"),
        ("cat", "cpu", "promote"),
        ("conv1d.padding", "cpu", "lower"),
        ("conv1d.padding", "cuda", "keep"),
        ("linear", "hpu", "keep"),
        ("exp.out", "cuda", "keep"),
        ("mylib::unheard_of", "cuda", "keep"),
    ],
)
def test_resolve(torch_policy, op, device, rule):
    assert torch_policy.resolve(op, device).rule == rule


def test_a_resolution_gives_its_reason_and_where_that_was_said(torch_policy):
    assert torch_policy.resolve("linear", "cpu").reason == (
        "arguments are cast to the region's dtype (torch.toml: [ops.cpu] linear)"
    )


def test_a_missing_row_is_said_to_be_missing(torch_policy):
    assert torch_policy.resolve("exp", "cpu") == Resolution(
        Rule.KEEP, "no row for exp on cpu in the policy 'torch': runs as it does outside a region"
    )


@pytest.mark.parametrize(
    ("op", "device", "message"),
    [
        (
            "norm",
            "cuda",
            "the overloads of aten::norm differ; name one of them: norm.Scalar (fp32_app",
        ),
        ("linaer", "cuda", "no operation aten::linaer; did you mean linear"),
        ("prod.nope", "cpu", "no overload 'nope'. Allowed: prod.default, prod.dim_int"),
        ("torch.nn.functional.linear", "cpu", "is not the name of an operation; write 'linear'"),
        ("linear", "cuda:0", "'cuda:0' is not a device type with autocast. Allowed: cpu, cuda"),
    ],
)
def test_resolve_refuses_with_advice(torch_policy, op, device, message):
    with pytest.raises(PolicyError) as error:
        torch_policy.resolve(op, device)
    assert message in str(error.value)


def test_expand_spells_out_overloads_as_the_dispatcher_does(torch_policy):
    known, unknown = expanded_rules(torch_policy, "cpu")
    assert {"aten::conv2d", "aten::conv2d.padding", "aten::prod", "aten::prod.dim_int"} <= set(
        known
    )
    assert known["aten::mm"].rule is Rule.LOWER
    assert not {"aten::mm.dtype", "aten::mm.out", "aten::mm.default"} & set(known)
    assert unknown == ()


def test_expand_tells_operations_that_torch_does_not_have(torch_policy):
    policy = torch_policy.replace(ops={"mylib::myop": "lower", "mylib::myop.x": "fp32"})
    known, unknown = expanded_rules(policy, "cuda")
    assert unknown == ("mylib::myop", "mylib::myop.x")
    assert not any(name.startswith("mylib") for name in known)


def test_an_exact_row_beats_a_bare_one_whatever_the_order(torch_policy):
    for ops in (
        {"sum": "lower", "sum.dim_IntList": "keep"},
        {"sum.dim_IntList": "keep", "sum": "lower"},
    ):
        policy = torch_policy.replace(ops=ops)
        assert policy.resolve("sum.default", "cpu").rule is Rule.LOWER
        assert policy.resolve("sum.dim_IntList", "cpu").rule is Rule.KEEP
        assert expanded_rules(policy, "cpu")[0]["aten::sum.dim_IntList"].rule is Rule.KEEP


# Values


def test_presets_load_and_are_the_same_object_each_time():
    assert {"default", "torch"} <= set(Policy.presets())
    assert all(Policy.load(name) is Policy.load(name) for name in Policy.presets())
    assert all(Policy.load(name).name == name for name in Policy.presets())


def test_nothing_of_a_policy_can_be_changed(torch_policy):
    with pytest.raises(dataclasses.FrozenInstanceError):
        torch_policy.name = "other"
    with pytest.raises(TypeError):
        torch_policy.tables["cpu"] = {}
    with pytest.raises(TypeError):
        torch_policy.rules("cpu")["aten::linear"] = Entry(Rule.KEEP)
    with pytest.raises(dataclasses.FrozenInstanceError):
        torch_policy.rules("cpu")["aten::linear"].rule = Rule.KEEP


def test_a_policy_keeps_no_hold_on_the_tables_it_was_made_of():
    table = {"aten::linear": Entry(Rule.LOWER)}
    policy = Policy("p", {"cpu": table})
    table["aten::linear"] = Entry(Rule.KEEP)
    assert policy.resolve("linear", "cpu").rule is Rule.LOWER


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))]
)
def test_copies_are_equal_and_hash_alike(torch_policy, duplicate):
    other = duplicate(torch_policy)
    assert other == torch_policy
    assert hash(other) == hash(torch_policy)
    assert len({other, torch_policy}) == 1


def test_equality_is_by_value_and_origin_is_no_value():
    here = Policy("p", {"cpu": {"aten::linear": Entry(Rule.LOWER, origin="here")}})
    there = Policy("p", {"cpu": {"aten::linear": Entry(Rule.LOWER, origin="there")}, "cuda": {}})
    assert here == there
    assert here != here.replace(mixed="promote")
    assert here != here.replace(ops={"linear": "fp32"})
    assert here != here.replace(name="q")


def test_fingerprint_follows_what_changes_results_and_nothing_else(torch_policy):
    exp, log = Entry(Rule.FP32), Entry(Rule.KEEP)
    one = Policy("one", {"cpu": {"aten::exp": exp, "aten::log": log}, "cuda": {"aten::exp": exp}})
    two = Policy("two", {"cuda": {"aten::exp": exp}, "cpu": {"aten::log": log, "aten::exp": exp}})
    assert one.fingerprint == two.fingerprint
    assert len(one.fingerprint) == 16
    changed = [
        one.replace(mixed="promote"),
        one.replace(ops={"cpu": {"exp": "lower"}}),
        one.replace(ops={"cpu": {"exp": None}}),
        one.retarget("cpu", like="cuda"),
    ]
    assert len({policy.fingerprint for policy in (one, *changed)}) == 5


def test_fingerprint_is_the_same_in_another_process(torch_policy):
    code = "from precast.policy.policy import policy_of, Policy; print(Policy.load('torch').fingerprint)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == torch_policy.fingerprint


# Changed policies


def test_replace_changes_all_device_types_or_one(torch_policy):
    policy = torch_policy.replace(name="mine", ops={"exp": "lower", "cuda": {"log": Rule.KEEP}})
    assert policy.name == "mine"
    assert {policy.resolve("exp", device).rule for device in DEVICE_TYPES} == {Rule.LOWER}
    assert policy.resolve("log", "cuda").rule is Rule.KEEP
    assert policy.resolve("log", "xpu").rule is Rule.FP32
    assert torch_policy.resolve("exp", "cuda").rule is Rule.FP32


def test_a_device_type_beats_all_device_types(torch_policy):
    policy = torch_policy.replace(ops={"cuda": {"exp": "keep"}, "exp": "lower"})
    assert policy.resolve("exp", "cuda").rule is Rule.KEEP
    assert policy.resolve("exp", "cpu").rule is Rule.LOWER


def test_a_bare_name_replaces_the_exact_rows_that_it_covers(torch_policy):
    before = torch_policy.replace(ops={"cuda": {"norm.out": "fp32"}})
    after = before.replace(ops={"cuda": {"norm": "lower"}})
    for overload in ("Scalar", "ScalarOpt_dim", "ScalarOpt_dtype"):
        assert after.resolve(f"norm.{overload}", "cuda").rule is Rule.LOWER
    assert after.resolve("norm.out", "cuda").rule is Rule.FP32  # no bare name covers out=


def test_none_takes_rows_away(torch_policy):
    policy = torch_policy.replace(ops={"cuda": {"norm": None, "exp": None}})
    assert "no row" in policy.resolve("norm", "cuda").reason
    assert "no row" in policy.resolve("exp", "cuda").reason
    assert not any("norm" in key for key in policy.rules("cuda") if key.startswith("aten::norm"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"ops": {"exp": "lowre"}},
            "'lowre' is not a rule; did you mean lower? Allowed: lower, lower_out_fp32, fp32",
        ),
        ({"ops": {"epx": "lower"}}, "replace(ops=...) epx: the installed PyTorch has no operation"),
        ({"ops": {"cuda": "lower"}}, "cuda is 'lower'; it must be a mapping"),
        ({"ops": {"exp": {"reason": "x"}}}, "there is no 'rule'"),
        ({"ops": {"exp": "flaot32"}}, "'flaot32' is not a rule; did you mean fp32"),
        ({"ops": {"exp": "bf16"}}, "'bf16' is not a rule; did you mean lower?"),
        ({"ops": {"exp": 3}}, "3 is not a rule. Allowed: lower"),
        ({"mixed": "widen"}, "mixed is 'widen'. Allowed: raise, promote"),
    ],
)
def test_replace_refuses_with_advice(torch_policy, changes, message):
    with pytest.raises(PolicyError) as error:
        torch_policy.replace(**changes)
    assert message in str(error.value)


def test_retarget_applies_one_device_types_table_to_another(torch_policy):
    policy = torch_policy.retarget("cpu", like="cuda")
    assert policy.rules("cpu") == torch_policy.rules("cuda")
    assert policy.rules("cuda") == torch_policy.rules("cuda")
    assert policy.resolve("softmax.int", "cpu").rule is Rule.FP32_SET_DTYPE
    assert policy.name == "torch (cpu like cuda)"
    with pytest.raises(PolicyError, match="'gpu' is not a device type"):
        torch_policy.retarget("gpu")


def test_a_policy_is_found_by_its_fingerprint_while_one_of_its_kind_is_alive() -> None:
    first = Policy.load("torch").replace(ops={"mm": "fp32", "cosh": "lower"})
    second = first.replace(name="second")
    assert policy_of(first.fingerprint).fingerprint == first.fingerprint
    del second
    assert policy_of(first.fingerprint) is first


@pytest.mark.parametrize(
    ("spellings", "rule"),
    [
        (("fp32", "float32", "torch.float32", torch.float32), "fp32"),
        (("fp16", "half", "float16", "torch.half", torch.float16), "float16"),
        (("bf16", "bfloat16", "torch.bfloat16", torch.bfloat16), "bfloat16"),
    ],
)
def test_a_dtype_is_written_in_any_usual_way(spellings: tuple[object, ...], rule: str) -> None:
    policy = Policy.load("torch")
    for spelling in spellings:
        modules = policy.replace(modules={"a": spelling, "b": {"dtype": spelling}}).modules
        assert [modules[name].dtype for name in ("a", "b")] == [rule, rule]
        if rule == "fp32":
            assert policy.replace(ops={"exp": spelling}).resolve("exp", "cpu").rule == rule
        elif isinstance(spelling, str):
            with precast.autocast("cpu", dtype=spelling):
                assert torch.get_autocast_dtype("cpu") is getattr(torch, rule)
