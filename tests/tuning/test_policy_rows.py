"""Under the policy of a choice every site runs in the dtype that the choice gives it, as a trace sees it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from precast.errors import PolicyError
from precast.policy.module_rules import decide
from precast.policy.policy import Policy, Rule, module_context, pattern_index
from precast.policy.rows import canonical
from precast.tuning.policy_rows import (
    PolicyRow,
    fulfills,
    policy_of,
    rows_of,
    with_patterns,
)
from precast.tuning.sites import CallRecord, DtypeChoice, OperationSite, TensorEdge, TunedProgram
from tests.tuning.programs import programs
from tests.tuning.traced import assert_runs_as_chosen

F32, LOW = torch.float32, torch.bfloat16


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(x + torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Layer()
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def _step(model):
    torch.manual_seed(0)
    return F.cross_entropy(model(torch.randn(2, 8)), torch.tensor([0, 1]))


UP, RELU, ADD = (
    OperationSite("body.up", "linear", rule=Rule.LOWER),
    OperationSite("body", "relu"),
    OperationSite("body", "add"),
)
NORM, TANH = OperationSite("body.norm", "native_layer_norm"), OperationSite("", "tanh")
HEAD = OperationSite("head", "linear", rule=Rule.LOWER)
LOSS = OperationSite(None, "cross_entropy_loss", rule=Rule.FP32)
PROGRAM = TunedProgram(
    sites=(UP, RELU, ADD, NORM, TANH, HEAD, LOSS),
    edges=(
        TensorEdge(None, UP, 16, dtype=F32),
        TensorEdge(None, UP, 64, dtype=F32, weight="body.up.weight"),
        TensorEdge(UP, RELU, 16),
        TensorEdge(None, ADD, 16, dtype=F32),
        TensorEdge(RELU, ADD, 16),
        TensorEdge(ADD, NORM, 16),
        TensorEdge(None, NORM, 8, dtype=F32, weight="body.norm.weight", decides=False),
        TensorEdge(NORM, TANH, 16),
        TensorEdge(TANH, HEAD, 16),
        TensorEdge(None, HEAD, 32, dtype=F32, weight="head.weight"),
        TensorEdge(HEAD, LOSS, 8),
    ),
    modules=("", "body", "body.up", "body.norm", "head"),
)
low_sites = st.sets(st.sampled_from(PROGRAM.sites))


@pytest.mark.parametrize("base", ["default", "torch"])
@settings(max_examples=6, deadline=None)
@given(low=low_sites)
def test_each_site_runs_as_chosen(base, low):
    choice = PROGRAM.choose(low)
    policy = policy_of(choice, PROGRAM, Policy.load(base))
    assert_runs_as_chosen(Model(), _step, policy, choice, PROGRAM)


def test_the_loss_has_its_row_for_the_device_alone():
    policy = policy_of(PROGRAM.choose([LOSS]), PROGRAM, Policy.load("default"))
    assert policy.resolve("cross_entropy_loss", "cpu").rule is Rule.LOWER
    assert policy.rules("cuda") == Policy.load("default").rules("cuda")


# --- the shortest file ---

NOTHING = Policy("nothing", {})


def written_rows(choice, program, _base):
    return with_patterns(rows_of(choice, program), program.modules)


def _says(policy: Policy, site: OperationSite) -> tuple[Rule | None, bool]:
    """The row that decides for a site, and whether its module has a row of its own."""
    key = canonical(site.op)
    outside = policy.rules("cpu").get(key)
    if site.module is None:
        return (outside.rule if outside else None), True
    inside = module_context(policy, site.module).ops.get(key, outside)
    matching = pattern_index(policy).matching(site.module)
    decided = decide(matching, policy.modules, site.module)
    return (inside.rule if inside else None), decided is not None and key in decided[1].ops


def _all_run_as_chosen(policy: Policy, choice: DtypeChoice, program: TunedProgram) -> bool:
    said = {site: _says(policy, site) for site in program.sites}
    with_rows = {op.partition("::")[2] for rule in policy.modules.values() for op in rule.ops}
    return all(
        fulfills(site, row, choice, program)
        and (is_own or not site.pinned or site.op not in with_rows)
        for site, (row, is_own) in said.items()
    )


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_under_the_rows_each_site_runs_as_chosen(data):
    program = data.draw(programs())
    choice = program.choose(data.draw(st.sets(st.sampled_from(program.sites))))
    assert _all_run_as_chosen(policy_of(choice, program, NOTHING), choice, program)


def test_a_row_has_its_reason():
    choice = PROGRAM.choose(PROGRAM.sites)
    policy = policy_of(
        choice, PROGRAM, Policy.load("default"), reason=lambda row: f"{len(row.sites)} sites"
    )
    assert policy.resolve("cross_entropy_loss", "cpu").reason.startswith("1 sites")


def test_what_the_base_does_already_is_not_written():
    program = TunedProgram(
        (UP, HEAD), (TensorEdge(None, UP, 1, dtype=F32), TensorEdge(None, HEAD, 1, dtype=F32))
    )
    assert written_rows(program.choose([UP, HEAD]), program, NOTHING) == []


def test_one_row_of_the_device_stands_for_all_modules():
    sites = tuple(OperationSite(f"layers.{i}", "softmax") for i in range(3))
    edges = tuple(TensorEdge(None, site, 1, dtype=LOW) for site in sites)
    names = ("", "layers", *(site.module for site in sites))
    program = TunedProgram(sites, edges, modules=names)
    [row] = written_rows(program.choose(), program, NOTHING)
    assert row == PolicyRow(None, "softmax", Rule.FP32, sites)


def test_a_site_whose_calls_may_have_16_bit_inputs_alone_has_a_row():
    """Its inputs are of both dtypes together, but each call may have those of one."""
    calls = (CallRecord("aten::add", (), count=2),)
    site = OperationSite("a", "add", calls=calls)
    edges = tuple(TensorEdge(None, site, 1, dtype=dtype) for dtype in (F32, LOW))
    program = TunedProgram((site,), edges, modules=("", "a"))
    [row] = written_rows(program.choose(), program, NOTHING)
    assert row.rule is Rule.FP32
    once = OperationSite("a", "add")
    edges = tuple(TensorEdge(None, once, 1, dtype=dtype) for dtype in (F32, LOW))
    program = TunedProgram((once,), edges, modules=("", "a"))
    assert written_rows(program.choose(), program, NOTHING) == []


def test_a_row_of_the_device_reaches_pinned_operations():
    outside, inside = (
        OperationSite(None, "relu", pinned=True),
        OperationSite("a", "relu", rule=Rule.LOWER),
    )
    edges = (TensorEdge(None, outside, 1, dtype=F32), TensorEdge(None, inside, 1, dtype=F32))
    program = TunedProgram((outside, inside), edges, modules=("", "a"))
    rows = written_rows(program.choose(), program, NOTHING)
    assert rows == [PolicyRow(None, "relu", Rule.FP32, (outside, inside))]


def test_modules_that_say_the_same_share_a_pattern():
    norms = tuple(OperationSite(f"layers.{i}.norm", "mul") for i in range(3))
    others = tuple(OperationSite(f"layers.{i}.mlp", "mul") for i in range(3))
    edges = tuple(TensorEdge(None, site, 1, dtype=LOW) for site in (*norms, *others))
    names = ("", "layers", *(f"layers.{i}{end}" for i in range(3) for end in ("", ".norm", ".mlp")))
    odd = OperationSite("", "mul")
    program = TunedProgram(
        (odd, *norms, *others), (TensorEdge(None, odd, 1, dtype=LOW), *edges), modules=names
    )
    choice = program.choose([odd, *others])
    assert written_rows(choice, program, NOTHING) == [
        PolicyRow("layers.*.norm", "mul", Rule.FP32, norms)
    ]


def test_a_base_with_rules_for_modules_is_refused():
    base = Policy.load("default").replace(modules={"head": "fp32"})
    with pytest.raises(PolicyError, match="has rules for modules"):
        policy_of(PROGRAM.choose(), PROGRAM, base)
