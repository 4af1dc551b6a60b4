"""Policy files: laid over each other, one error for a bad one, nothing lost by writing and reading."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precast.errors import PolicyError
from precast.policy.policy import DEVICE_TYPES, Entry, Policy, Rule

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
    untouched = set(torch_policy.rules("cuda")) - {"aten::exp"}
    assert all(policy.rules("cuda")[k] == torch_policy.rules("cuda")[k] for k in untouched)


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


def test_a_row_may_give_a_reason_of_its_own(load):
    mine = load('base = "torch"\n[ops.cuda]\nexp = { rule = "keep", reason = "measured" }\n')
    rule, reason = mine.resolve("exp", "cuda")
    assert rule is Rule.KEEP
    assert reason.startswith("measured (")
    assert reason.endswith("mine.toml: [ops.cuda] exp)")


FILE_ERRORS = {
    "TOML syntax, with the line": ('name = "x"\n[ops\n', ["not TOML", "line 2"]),
    "the same key twice": ('[ops]\nexp = "keep"\nexp = "fp32"\n', ["not TOML", "line 3"]),
    "an unknown key": (
        'bass = "torch"\n',
        ["'bass'", "did you mean base?", "mixed, measured, ops"],
    ),
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
    "its own base": ('base = "mine.toml"\n', ["form a circle", "mine.toml -> mine.toml"]),
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
def test_presets_survive_save_and_load(name, tmp_path):
    policy = Policy.load(name)
    policy.save(tmp_path / "p.toml")
    text = policy.text
    assert (tmp_path / "p.toml").read_text(encoding="utf-8") == text
    assert Policy.load(tmp_path / "p.toml") == policy


def test_a_text_has_one_line_an_operation(torch_policy):
    lines = torch_policy.text.splitlines()
    assert '"_convolution.deprecated" = "lower"' in lines
    assert 'linear = "lower"' in lines
    assert sum(line.startswith("_cudnn_rnn = {") for line in lines) == 1


def test_rows_that_all_device_types_share_are_written_once():
    text = Policy("p", {}).replace(ops={"my::op": "lower", "cpu": {"exp": "keep"}}).text
    assert text.count("my::op") == 1
    assert "[ops]\n" in text
    assert "[ops.cpu]\n" in text
    assert "[ops.cuda]" not in text


def test_a_failed_save_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, torch_policy):
    target = tmp_path / "p.toml"
    target.write_text("old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        torch_policy.save(target)
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
def test_load_undoes_save(tmp_path_factory, policy, shared):
    policy = policy.replace(ops=shared)
    path = tmp_path_factory.getbasetemp() / "policy.toml"
    policy.save(path)
    loaded = Policy.load(path)
    assert loaded == policy
    assert loaded.fingerprint == policy.fingerprint
    assert hash(loaded) == hash(policy)
