"""The advice in errors and warnings about rules for modules, followed on models that have the fault."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import precast
from precast._internal import cures
from precast.errors import PolicyError
from precast.policy.module_plan import plan
from precast.policy.policy import Policy

X = torch.ones(2, 8)


def model() -> Any:
    torch.manual_seed(0)
    return nn.ModuleDict({"body": nn.Linear(8, 8), "head": nn.Linear(8, 8)}).eval()


def policy(**modules: Any) -> Policy:
    return Policy.load("default").replace(modules=modules)


def precisions(of: nn.Module, rules: Policy) -> dict[str, str]:
    return {module.name: module.inside.precision for module in plan(of, rules).modules}


@pytest.mark.trial("EXACT_RULE")
def test_patterns_that_disagree_need_an_exact_or_a_narrower_one() -> None:
    wide = policy(**{"*": "fp32", "h*": "bfloat16"})
    with pytest.raises(PolicyError) as raised:
        plan(model(), wide)
    assert cures.EXACT_RULE(name="'head'") in str(raised.value)
    assert precisions(model(), wide.replace(modules={"head": "fp32"}))["head"] == "fp32"
    narrow = wide.replace(modules={"*": None, "b*": "fp32"})
    assert precisions(model(), narrow) == {"": "lower", "body": "fp32", "head": "bfloat16"}


@pytest.mark.trial("ONE_RULE")
def test_a_module_with_two_names_gets_one_rule() -> None:
    shared = model()
    shared["tied"] = shared["head"]
    rules = policy(head="fp32", tied="bfloat16")
    with pytest.raises(PolicyError) as raised:
        plan(shared, rules)
    assert cures.ONE_RULE.text in str(raised.value)
    for same in (rules.replace(modules={"tied": None}), rules.replace(modules={"tied": "fp32"})):
        found = precisions(shared, same)
        assert (found["head"], found["tied"]) == ("fp32", "fp32")


@pytest.mark.trial("WHOLE_ATTENTION")
def test_the_projection_in_attention_needs_a_rule_for_the_whole() -> None:
    attention = nn.MultiheadAttention(8, 2).eval()
    part = plan(nn.ModuleDict({"attention": attention}), policy(**{"attention.out_proj": "fp32"}))
    assert [cures.WHOLE_ATTENTION.text in each for each in part.complaints()] == [True]
    whole = plan(nn.ModuleDict({"attention": attention}), policy(attention="fp32"))
    assert not whole.complaints()
    assert whole.inside("attention.out_proj").precision == "fp32"


@pytest.mark.trial("LOWER_AGAIN")
def test_a_float8_rule_inside_a_float32_module_switches_autocast_on() -> None:
    nested = nn.ModuleDict({"block": model()})
    rules = policy(**{"block": "fp32", "block.head": "float8"})
    assert any(
        cures.LOWER_AGAIN(rule="float8") in each for each in plan(nested, rules).complaints()
    )
    row = {"dtype": "lower", "ops": {"linear": "float8"}}
    mended = rules.replace(modules={"block.head": row})
    inside = plan(nested, mended).inside("block.head")
    assert inside.enabled
    assert inside.ops["aten::linear"].rule == "float8"
    assert not plan(nested, mended).complaints()


@pytest.mark.trial("WHOLE_SCRIPTED")
def test_a_part_of_a_scripted_module_needs_a_rule_for_the_whole() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval())
    outer = nn.Sequential(scripted)
    with pytest.raises(PolicyError) as raised:
        plan(outer, policy(**{"0.1": "fp32"}))
    assert cures.WHOLE_SCRIPTED(name="'0'") in str(raised.value)
    rules = policy(**{"0": "fp32"})
    with precast.attach(outer, rules, hold=False), torch.no_grad(), precast.autocast("cpu"):
        assert outer(X).dtype is torch.float32
