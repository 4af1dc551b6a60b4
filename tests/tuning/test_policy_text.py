"""Under the policy of a choice every site runs in the dtype that the choice gives it, as a trace sees it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from precast.errors import PolicyError
from precast.policy.policy import Policy, Rule
from precast.tuning.policy_text import policy_of
from precast.tuning.sites import Edge, Program, Site
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
    Site("body.up", "linear", rule=Rule.LOWER),
    Site("body", "relu"),
    Site("body", "add"),
)
NORM, TANH = Site("body.norm", "native_layer_norm"), Site("", "tanh")
HEAD = Site("head", "linear", rule=Rule.LOWER)
LOSS = Site(None, "cross_entropy_loss", rule=Rule.FP32)
PROGRAM = Program(
    sites=(UP, RELU, ADD, NORM, TANH, HEAD, LOSS),
    edges=(
        Edge(None, UP, 16, dtype=F32),
        Edge(None, UP, 64, dtype=F32, weight="body.up.weight"),
        Edge(UP, RELU, 16),
        Edge(None, ADD, 16, dtype=F32),
        Edge(RELU, ADD, 16),
        Edge(ADD, NORM, 16),
        Edge(None, NORM, 8, dtype=F32, weight="body.norm.weight", decides=False),
        Edge(NORM, TANH, 16),
        Edge(TANH, HEAD, 16),
        Edge(HEAD, LOSS, 8),
    ),
    modules=("", "body", "body.up", "body.norm", "head"),
)
low_sites = st.sets(st.sampled_from(PROGRAM.sites))


@pytest.mark.parametrize("base", ["default", "torch"])
@settings(max_examples=12, deadline=None)
@given(low=low_sites)
def test_each_site_runs_as_chosen(base, low):
    choice = PROGRAM.choose(low)
    policy = policy_of(choice, PROGRAM, Policy.load(base))
    assert_runs_as_chosen(Model(), _step, policy, choice, PROGRAM)


def test_the_loss_has_its_row_for_the_device_alone():
    policy = policy_of(PROGRAM.choose([LOSS]), PROGRAM, Policy.load("default"))
    assert policy.resolve("cross_entropy_loss", "cpu").rule is Rule.LOWER
    assert policy.entries("cuda") == Policy.load("default").entries("cuda")


def test_a_choice_that_no_policy_can_carry_out_is_an_error():
    stuck = Site("", "relu", casts_down=False)
    program = Program((stuck,), (Edge(None, stuck, 8, dtype=F32),))
    with pytest.raises(PolicyError, match=r"the model: relu.*settle"):
        policy_of({stuck: LOW}, program, Policy.load("default"))


def test_the_error_counts_the_sites():
    with pytest.raises(PolicyError, match=r"body\.up: linear and 6 other sites"):
        policy_of({}, PROGRAM, Policy.load("default"))
