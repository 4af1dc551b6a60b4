"""Policies that say where they were measured: kept in files, of no effect on results, and a warning elsewhere."""

from __future__ import annotations

import copy
import pickle
import uuid
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import precast
from precast.errors import PolicyError, PrecastWarning
from precast.policy import measured as measured_
from precast.policy.policy import Policy
from precast.policy.shortest_text import whole_file

ELSEWHERE = {
    "device": "cpu",
    "machine": "Zilog Z80",
    "torch": "2.11.0",
    "seed": 3,
    "gain": 1.5,
    "compiled": False,
}


@pytest.fixture
def name() -> str:
    """A name that no other test has warned of."""
    return f"p{uuid.uuid4().hex}"


def test_a_file_keeps_what_it_says_of_its_measurements(tmp_path: Path) -> None:
    text = """
base = "default"
[ops]
softmax = { rule = "fp32", reason = "bfloat16 cost 3.1% of loss" }
[measured]
machine = "Zilog Z80"
torch = "2.11.0"
date = "2026-11-23"
seed = 3
command = "precast tune my_model:make"
"""
    (tmp_path / "tuned.toml").write_text(text)
    policy = Policy.load(tmp_path / "tuned.toml")
    assert policy.measured == {
        "machine": "Zilog Z80",
        "torch": "2.11.0",
        "date": "2026-11-23",
        "seed": 3,
        "command": "precast tune my_model:make",
    }
    policy.save(tmp_path / "whole.toml")
    again = Policy.load(tmp_path / "whole.toml")
    assert again == policy
    assert list(again.measured.items()) == list(policy.measured.items())
    (tmp_path / "short.toml").write_text(whole_file(policy))
    assert Policy.load(tmp_path / "short.toml").measured == policy.measured


def test_it_is_of_the_file_that_has_it_and_of_no_other(tmp_path: Path) -> None:
    (tmp_path / "tuned.toml").write_text('base = "torch"\n[measured]\nmachine = "Zilog Z80"\n')
    (tmp_path / "mine.toml").write_text('base = "tuned.toml"\n[ops]\nexp = "keep"\n')
    assert not Policy.load(tmp_path / "mine.toml").measured


def test_it_is_no_part_of_what_a_policy_does() -> None:
    policy = Policy.load("default")
    told = policy.replace(measured=ELSEWHERE)
    assert told.fingerprint == policy.fingerprint
    assert told.tables == policy.tables
    assert told != policy
    assert told.replace(measured={}) == policy


def test_it_cannot_be_changed_and_survives_copies() -> None:
    given = dict(ELSEWHERE)
    policy = Policy.load("default").replace(measured=given)
    given["seed"] = 4
    assert policy.measured == ELSEWHERE
    with pytest.raises(TypeError):
        policy.measured["seed"] = 4  # type: ignore[index]
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert copy.deepcopy(policy).measured == ELSEWHERE


def test_other_rules_were_not_measured() -> None:
    policy = Policy.load("default").replace(measured=ELSEWHERE)
    assert policy.replace(name="mine").measured == ELSEWHERE
    assert not policy.replace(ops={"exp": "fp32"}).measured
    assert not policy.replace(mixed="raise").measured
    assert not policy.replace(modules={"head": "fp32"}).measured
    assert not policy.retarget("cpu", like="cuda").measured
    assert policy.replace(ops={"exp": "fp32"}, measured=ELSEWHERE).measured == ELSEWHERE


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (3, r"\[measured\] is 3; it must be a mapping"),
        ({"seeds": [1, 2]}, r"\[measured\] seeds is \[1, 2\]; it must be text, a number"),
        ({"machine": 3}, r"\[measured\] machine is 3; it must be text"),
        ({3: "x"}, r"\[measured\]: a key is 3; it must be text"),
        ({"note": "\ud800"}, r"\[measured\] note is .*UTF-8"),
    ],
)
def test_what_cannot_be_written_is_refused(wrong: object, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        Policy.load("default").replace(measured=wrong)  # type: ignore[arg-type]


def test_a_date_in_a_file_is_text(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text("[measured]\ndate = 2026-11-23\n")
    with pytest.raises(PolicyError, match=r"p\.toml: \[measured\] date .* write a date as text"):
        Policy.load(tmp_path / "p.toml")


# --- elsewhere ---


def test_elsewhere_it_warns_once(name: str) -> None:
    policy = Policy.load("default").replace(name=name, measured=ELSEWHERE)
    with pytest.warns(PrecastWarning) as said, precast.autocast("cpu", policy=policy):
        pass
    (warning,) = said
    assert f"The policy {name!r} was measured elsewhere" in str(warning.message)
    assert "machine: Zilog Z80, here " in str(warning.message)
    again = Policy.load("default").replace(name=name, measured=ELSEWHERE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each in (policy, again):
            with precast.autocast("cpu", policy=each):
                pass


def test_an_attached_model_warns_too(name: str) -> None:
    rules = {"0": "fp32"}
    policy = Policy.load("default").replace(name=name, modules=rules, measured=ELSEWHERE)
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.warns(PrecastWarning, match="measured elsewhere"):
        with precast.attach(model, policy), precast.autocast("cpu"):
            model(torch.ones(1, 2))


def test_an_equal_policy_that_was_not_measured_does_not_keep_it_silent(name: str) -> None:
    plain = Policy.load("default").replace(name=name)
    with precast.autocast("cpu", policy=plain):
        pass
    told = plain.replace(measured=ELSEWHERE)
    with (
        pytest.warns(PrecastWarning, match="measured elsewhere"),
        precast.autocast("cpu", policy=told),
    ):
        pass


@pytest.mark.parametrize(
    "measured",
    [
        {},
        {"seed": 3},
        measured_.this_machine("cpu"),
        {"torch": str(torch.__version__).partition("+")[0]},
        {"torch": str(torch.__version__).partition("+")[0] + "+cu999"},
        {"machine": "", "torch": ""},
    ],
)
def test_at_home_it_does_not(name: str, measured: dict[str, object]) -> None:
    policy = Policy.load("default").replace(name=name, measured=measured)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with precast.autocast("cpu", policy=policy):
            pass


def test_another_release_of_pytorch_and_another_device_are_elsewhere(name: str) -> None:
    for number, wrong in enumerate(({"torch": "1.13.1"}, {"torch": "a fork"}, {"device": "cuda"})):
        policy = Policy.load("default").replace(
            name=f"{name}{number}", measured={**measured_.this_machine("cpu"), **wrong}
        )
        with pytest.warns(PrecastWarning) as said, precast.autocast("cpu", policy=policy):
            pass
        (key,) = wrong
        assert f"({key}: {wrong[key]}, here " in str(said[0].message)


def test_this_machine_has_a_name() -> None:
    here = measured_.this_machine("cpu")
    assert here["machine"]
    assert here == {
        "device": "cpu",
        "machine": measured_.machine_name("cpu"),
        "torch": torch.__version__,
    }
    if not torch.cuda.is_available():
        assert measured_.machine_name("cuda") == ""
    assert measured_.machine_name("maia") == ""
