"""A policy as a file: whole, short, and saying what the policy says."""

from __future__ import annotations

import tempfile
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precast.policy.policy import DEVICE_TYPES, Policy, Rule, expanded_rules
from precast.policy.shortest_text import whole_file

OPERATIONS = ["mm", "linear", "softmax.int", "softmax", "add.Tensor", "exp", "conv2d", "cumsum"]
RULES = st.sampled_from(["lower", "fp32", "keep", "promote", None])
CHANGES = st.dictionaries(st.sampled_from(OPERATIONS), RULES, max_size=4)


def loaded(text: str) -> Policy:
    tomllib.loads(text)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pasted.toml"
        path.write_text(text)
        return Policy.load(path)


def says(policy: Policy) -> object:
    """What each operation does; no row, and the rule `keep`, are the same."""
    rules = {
        device: {
            o: e.rule
            for o, e in expanded_rules(policy, device)[0].items()
            if e.rule is not Rule.KEEP
        }
        for device in DEVICE_TYPES
    }
    return rules, policy.mixed, dict(policy.modules)


@settings(max_examples=40)
@given(
    st.sampled_from(["default", "lean", "torch", None]),
    CHANGES,
    CHANGES,
    st.sampled_from(["raise", "promote"]),
    st.dictionaries(st.sampled_from(["a.b", "**.head"]), st.sampled_from(["fp32", "keep"])),
)
def test_the_file_says_what_the_policy_says(
    base: str | None, everywhere: object, on_cpu: object, mixed: str, modules: object
) -> None:
    policy = Policy("mine", {}) if base is None else Policy.load(base)
    ops = {**everywhere, "cpu": on_cpu}  # type: ignore[dict-item]
    policy = policy.replace(ops=ops, mixed=mixed, modules=modules)  # type: ignore[arg-type]
    assert says(loaded(whole_file(policy))) == says(policy)
    lower = {"cpu": {"add.Tensor": "lower"}}
    assert says(loaded(whole_file(policy, ops=lower))) == says(policy.replace(ops=lower))


@pytest.mark.parametrize("name", Policy.presets())
def test_a_preset_is_one_line(name: str) -> None:
    assert whole_file(Policy.load(name)) == f'base = "{name}"\n'


def test_one_change_is_one_row() -> None:
    text = whole_file(Policy.load("torch"), ops={"cpu": {"mm": "fp32"}})
    assert text == 'base = "torch"\n\n[ops.cpu]\nmm = "fp32"\n'


def test_a_policy_without_a_base_needs_none() -> None:
    policy = Policy("mine", {}).replace(ops={"cpu": {"linear": "fp32"}})
    assert whole_file(policy) == '[ops.cpu]\nlinear = "fp32"\n'
