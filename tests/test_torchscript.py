"""TorchScript modules run on the policy in force, not on TorchScript's own autocast pass."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import precast
from precast import Policy, _torch

# TorchScript is deprecated since torch 2.13, and programs still use it.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


def scripted() -> tuple[torch.nn.Module, torch.jit.ScriptModule]:
    """A module and its scripted self; its class is its own, for scripted instances of one class share their graphs.

    For the same reason it has no submodules: a scripted `nn.Linear` may have run in a torch region in another test.
    """

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Parameter(torch.randn(4, 4))
            self.second = torch.nn.Parameter(torch.randn(4, 4))
            self.bias = torch.nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(torch.relu(F.linear(x, self.first, self.bias)), self.second)

    net = Net()
    return net, torch.jit.script(net)


@pytest.mark.parametrize("policy", ["torch", "default"])
def test_a_scripted_module_equals_the_eager_one(policy: str) -> None:
    net, script = scripted()
    x = torch.randn(2, 4)
    for _ in range(4):  # the executor profiles, then optimises
        results = []
        for module in (net, script):
            with precast.autocast("cpu", policy=policy):
                y = module(x)
            results.append((y, *torch.autograd.grad(y.float().sum(), list(net.parameters()))))
        assert results[0][0].dtype is torch.bfloat16
        assert all(map(torch.equal, *results))


def test_a_rule_unlike_pytorchs_gets_unrounded_inputs() -> None:
    keep = Policy.load("torch").replace(ops={"linear": "fp32"})
    net, script = scripted()
    x = torch.randn(2, 4)
    for _ in range(4):
        with precast.autocast("cpu", policy=keep):
            y = script(x)
        assert y.dtype is torch.float32
        assert torch.equal(y, net(x))
    torch.autograd.grad(y.sum(), list(net.parameters()))


def test_pytorchs_pass_rounds_before_any_rule_is_asked() -> None:
    _, script = scripted()
    with torch.autocast("cpu"):
        graph = str(script.graph_for(torch.randn(2, 4)))
    assert "_autocast_to_reduced_precision" in graph


def test_only_policies_unlike_pytorchs_switch_the_optimiser_off() -> None:
    keep = Policy.load("torch").replace(ops={"linear": "fp32"})
    for policy in ("torch", "default"):
        with precast.autocast("cpu", policy=policy):
            assert _torch.optimizes_torchscript()
    with precast.autocast("cpu", policy=keep):
        assert not _torch.optimizes_torchscript()
        with precast.autocast("cpu", enabled=False):
            assert not _torch.optimizes_torchscript()
        thread = threading.Thread(target=lambda: elsewhere.append(_torch.optimizes_torchscript()))
        elsewhere: list[bool] = []
        thread.start()
        thread.join()
        assert elsewhere == [True]
    assert _torch.optimizes_torchscript()


def test_a_known_limit_what_ran_under_pytorchs_policy_first_keeps_its_casts() -> None:
    keep = Policy.load("torch").replace(ops={"linear": "fp32"})
    net, script = scripted()
    x = torch.randn(2, 4)
    with torch.autocast("cpu"):
        script(x)
    with precast.autocast("cpu", policy=keep):
        y = script(x)
    assert y.dtype is torch.float32
    assert not torch.equal(y, net(x)), "no longer a limit: say so in docs/differences.md"


def test_a_known_limit_what_ran_under_another_policy_first_cannot_be_trained_under_pytorchs() -> (
    None
):
    keep = Policy.load("torch").replace(ops={"relu": "fp32"})
    net, script = scripted()
    x = torch.randn(2, 4)
    for policy in (keep, "torch"):
        for _ in range(4):
            with precast.autocast("cpu", policy=policy):
                y = script(x)
    with pytest.raises(
        RuntimeError, match="same dtype"
    ):  # loud, at least; says docs/differences.md
        torch.autograd.grad(y.float().sum(), list(net.parameters()))
