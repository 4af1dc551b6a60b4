"""Policies as values and as files: what they say, what they refuse, and that nothing is lost on the way."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precast.errors import PolicyError
from precast.policy import DEVICE_TYPES, Entry, Policy, Resolution, Rule

OPERATIONS = (
    "aten::linear",
    "aten::softmax",
    "aten::softmax.int",
    "aten::prod.default",
    "my::op.x",
)


@pytest.fixture
def torch_policy():
    return Policy.load("torch")


@pytest.fixture
def load(tmp_path):
    def write_and_load(text: str, name: str = "mine.toml") -> Policy:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return Policy.load(tmp_path / name)

    return write_and_load


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


def test_a_resolution_gives_its_reason_and_where_that_was_said(torch_policy, load):
    assert torch_policy.resolve("linear", "cpu").reason == (
        "arguments are cast to the region's dtype (torch.toml: [ops.cpu] linear)"
    )
    mine = load('base = "torch"\n[ops.cuda]\nexp = { rule = "keep", reason = "measured" }\n')
    rule, reason = mine.resolve("exp", "cuda")
    assert rule is Rule.KEEP
    assert reason.startswith("measured (")
    assert reason.endswith("mine.toml: [ops.cuda] exp)")


def test_a_missing_row_is_said_to_be_missing(torch_policy):
    assert torch_policy.resolve("exp", "cpu") == Resolution(
        Rule.KEEP, "no row for exp on cpu in the policy 'torch': runs as it does outside a region"
    )


@pytest.mark.parametrize(
    ("op", "device", "message"),
    [
        ("norm", "cuda", "the overloads of aten::norm differ; ask for one: norm.Scalar (fp32_app"),
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
    known, unknown = torch_policy.expand("cpu")
    assert {"aten::conv2d", "aten::conv2d.padding", "aten::prod", "aten::prod.dim_int"} <= set(
        known
    )
    assert known["aten::mm"].rule is Rule.LOWER
    assert not {"aten::mm.dtype", "aten::mm.out", "aten::mm.default"} & set(known)
    assert unknown == ()


def test_expand_tells_operations_that_torch_does_not_have(torch_policy):
    policy = torch_policy.replace(ops={"mylib::myop": "lower", "mylib::myop.x": "fp32"})
    known, unknown = policy.expand("cuda")
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
        assert policy.expand("cpu")[0]["aten::sum.dim_IntList"].rule is Rule.KEEP


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
        torch_policy.entries("cpu")["aten::linear"] = Entry(Rule.KEEP)
    with pytest.raises(dataclasses.FrozenInstanceError):
        torch_policy.entries("cpu")["aten::linear"].rule = Rule.KEEP


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
    code = "from precast.policy import Policy; print(Policy.load('torch').fingerprint)"
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
    assert not any("norm" in key for key in policy.entries("cuda") if key.startswith("aten::norm"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"ops": {"exp": "lowre"}},
            "'lowre' is not a rule; did you mean lower? Allowed: lower, fp32",
        ),
        ({"ops": {"epx": "lower"}}, "replace(ops=...) epx: the installed PyTorch has no operation"),
        ({"ops": {"cuda": "lower"}}, "cuda is 'lower'; it must be a mapping"),
        ({"ops": {"exp": {"reason": "x"}}}, "there is no 'rule'"),
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
    assert policy.entries("cpu") == torch_policy.entries("cuda")
    assert policy.entries("cuda") == torch_policy.entries("cuda")
    assert policy.resolve("softmax.int", "cpu").rule is Rule.FP32_SET_DTYPE
    assert policy.name == "torch (cpu like cuda)"
    with pytest.raises(PolicyError, match="'gpu' is not a device type"):
        torch_policy.retarget("gpu")


# Files


def test_a_file_is_laid_over_its_base(load, torch_policy):
    policy = load(
        'base = "torch"\nmixed = "promote"\n'
        '[ops]\nexp = "lower"\n"mylib::myop" = "lower"\n'
        '[ops.cuda]\nexp = { rule = "keep", reason = "measured" }\n'
    )
    assert policy.name == "mine"
    assert policy.mixed == "promote"
    assert policy.resolve("exp", "cuda")[0] is Rule.KEEP
    assert policy.resolve("exp", "cpu").rule is Rule.LOWER
    assert policy.resolve("mylib::myop", "privateuseone").rule is Rule.LOWER
    untouched = set(torch_policy.entries("cuda")) - {"aten::exp"}
    assert all(policy.entries("cuda")[k] == torch_policy.entries("cuda")[k] for k in untouched)


def test_a_base_may_be_a_file_beside_this_one(load, tmp_path):
    (tmp_path / "sub").mkdir()
    load('base = "torch"\nmixed = "promote"\n[ops]\nexp = "keep"\n', "house.toml")
    policy = load('name = "x"\nbase = "../house.toml"\n[ops.cuda]\nlog = "keep"\n', "sub/mine.toml")
    assert (policy.name, policy.mixed) == ("x", "promote")
    assert {policy.resolve(op, "cuda").rule for op in ("exp", "log")} == {Rule.KEEP}


def test_a_file_without_a_base_starts_empty(load):
    policy = load('[ops.cpu]\nlinear = "lower"\n')
    assert {device: set(table) for device, table in policy.tables.items()} == {
        "cpu": {"aten::linear"}
    }
    assert policy.mixed == "raise"


FILE_ERRORS = {
    "TOML syntax, with the line": ('name = "x"\n[ops\n', ["not TOML", "line 2"]),
    "the same key twice": ('[ops]\nexp = "keep"\nexp = "fp32"\n', ["not TOML", "line 3"]),
    "an unknown key": ('bass = "torch"\n', ["'bass'", "did you mean base?", "mixed, ops"]),
    "a name that is no text": ("name = 3\n", ["name is 3", "must be text"]),
    "a wrong mixed": ('mixed = "widen"\n', ["mixed is 'widen'", "Allowed: raise, promote"]),
    "a list for mixed": ("mixed = []\n", ["mixed is []", "Allowed: raise, promote"]),
    "ops that is no table": ("ops = 3\n", ["ops is 3", "[ops.cuda]"]),
    "a device that is no table": ("ops.cuda = 3\n", ["[ops.cuda] is 3", "table of rules"]),
    "a misspelt device": (
        '[ops.cudda]\nexp = "keep"\n',
        ["[ops] cudda", "did you mean cuda", "mps"],
    ),
    "a misspelt rule": ('[ops]\nexp = "lowr"\n', ["[ops] exp", "'lowr'", "mean lower", "banned"]),
    "a rule that is a number": ("[ops.cpu]\nexp = 16\n", ["[ops.cpu] exp", "16 is not a rule"]),
    "a misspelt operation": ('[ops]\nlayernorm = "keep"\n', ["[ops] layernorm", "layer_norm"]),
    "a misspelt overload": (
        '[ops]\n"sum.dims" = "keep"\n',
        ["no overload 'dims'", "sum.dim_IntList"],
    ),
    "an overload without quotes": (
        '[ops]\nsum.dim_IntList = "keep"\n',
        ["[ops] sum", '"softmax.int"'],
    ),
    "a Python path": ('[ops]\n"torch.nn.functional.gelu" = "keep"\n', ["dispatcher's names"]),
    "one operation twice": (
        '[ops]\nexp = "keep"\n"aten::exp" = "keep"\n',
        ["already", "aten::exp"],
    ),
    "a reason that is no text": ("[ops]\nexp = {rule = 'keep', reason = 3}\n", ["reason is 3"]),
    "a key unknown in a row": (
        "[ops]\nexp = {rule = 'keep', why = 'x'}\n",
        ["'why' is not allowed"],
    ),
    "an unknown build": (
        "[ops]\nexp = {rule = 'keep', builds = 'x'}\n",
        ["builds is 'x'", "'rocm'"],
    ),
    "no dtype argument to set": ('[ops]\nexp = "fp32_set_dtype"\n', ["exp has no dtype argument"]),
    "no overload to append to": (
        '[ops]\nexp = "fp32_append_dtype"\n',
        ["exp has no overload that"],
    ),
    "a base that is no text": ("base = 3\n", ["base is 3", "preset"]),
    "a base that is not there": ('base = "torhc"\n', ["no policy 'torhc'", "did you mean torch?"]),
    "its own base": ('base = "mine.toml"\n', ["back to themselves", "mine.toml -> mine.toml"]),
}


@pytest.mark.parametrize(("text", "parts"), FILE_ERRORS.values(), ids=FILE_ERRORS.keys())
def test_a_bad_file_gets_one_error_that_says_where_and_what_is_allowed(load, text, parts):
    with pytest.raises(PolicyError) as error:
        load(text)
    assert [part for part in ("mine.toml", *parts) if part not in str(error.value)] == []


def test_a_cycle_of_bases_is_an_error(load, tmp_path):
    (tmp_path / "b.toml").write_text('base = "a.toml"\n')
    with pytest.raises(PolicyError, match=r"a\.toml -> b\.toml -> a\.toml"):
        load('base = "b.toml"\n', "a.toml")


def test_an_error_in_a_base_names_both_files(load, tmp_path):
    (tmp_path / "b.toml").write_text('[ops]\nexp = "x"\n')
    with pytest.raises(
        PolicyError, match=r"a\.toml: base = 'b\.toml': .*b\.toml: \[ops\] exp: 'x'"
    ):
        load('base = "b.toml"\n', "a.toml")


@pytest.mark.parametrize("name", ["nothing.toml", "torhc", ""])
def test_a_policy_that_is_not_there(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PolicyError, match=r"neither a preset nor a file.*default.*torch"):
        Policy.load(name)


def test_a_file_that_is_not_text(tmp_path):
    (tmp_path / "p.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PolicyError, match=r"p\.toml: cannot be read"):
        Policy.load(tmp_path / "p.toml")


@pytest.mark.parametrize("name", Policy.presets())
def test_presets_survive_dump_and_load(name, tmp_path):
    policy = Policy.load(name)
    text = policy.dump(tmp_path / "p.toml")
    assert (tmp_path / "p.toml").read_text(encoding="utf-8") == text
    assert Policy.load(tmp_path / "p.toml") == policy


def test_a_dump_has_one_line_an_operation(torch_policy):
    lines = torch_policy.dump().splitlines()
    assert '"_convolution.deprecated" = "lower"' in lines
    assert 'linear = "lower"' in lines
    assert sum(line.startswith("_cudnn_rnn = {") for line in lines) == 1


def test_rows_that_all_device_types_share_are_written_once():
    text = Policy("p", {}).replace(ops={"my::op": "lower", "cpu": {"exp": "keep"}}).dump()
    assert text.count("my::op") == 1
    assert "[ops]\n" in text
    assert "[ops.cpu]\n" in text
    assert "[ops.cuda]" not in text


def test_a_failed_dump_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, torch_policy):
    target = tmp_path / "p.toml"
    target.write_text("old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        torch_policy.dump(target)
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["p.toml"]


entries = st.builds(
    Entry,
    st.sampled_from([Rule.LOWER, Rule.FP32, Rule.PROMOTE, Rule.BANNED, Rule.KEEP]),
    st.text(max_size=20),
    builds=st.sampled_from(["", "cuda", "rocm"]),
)
tables = st.dictionaries(
    st.sampled_from(DEVICE_TYPES), st.dictionaries(st.sampled_from(OPERATIONS), entries)
)
policies = st.builds(
    Policy, st.text(max_size=9), tables, st.sampled_from(["raise", "promote"]), st.text(max_size=20)
)


@settings(deadline=None)
@given(policies, st.dictionaries(st.sampled_from(OPERATIONS), entries))
def test_load_undoes_dump(tmp_path_factory, policy, shared):
    policy = policy.replace(ops=shared)
    path = tmp_path_factory.getbasetemp() / "policy.toml"
    policy.dump(path)
    loaded = Policy.load(path)
    assert loaded == policy
    assert loaded.fingerprint == policy.fingerprint
    assert hash(loaded) == hash(policy)
