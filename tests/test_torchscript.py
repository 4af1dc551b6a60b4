"""TorchScript modules run on the policy in force, not on TorchScript's own autocast pass."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

import precast
from precast import Policy, _torch

# TorchScript is deprecated since torch 2.13, and programs still use it.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


def scripted() -> tuple[torch.nn.Module, torch.jit.ScriptModule]:
    """A module and its scripted self, of a class of its own: scripted instances of one class share their graphs."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(4, 4)
            self.second = torch.nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.relu(self.first(x)))

    net = Net()
    return net, torch.jit.script(net)


def torchscript_pass() -> bool:
    before = _torch.set_torchscript_autocast(True)
    _torch.set_torchscript_autocast(before)
    return before


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
    for policy in ("torch", keep):
        for _ in range(4):
            with precast.autocast("cpu", policy=policy):
                y = script(x)
    assert y.dtype is torch.float32
    assert torch.equal(y, net(x))


def test_pytorchs_pass_rounds_before_any_rule_is_asked() -> None:
    _, script = scripted()
    with torch.autocast("cpu"):
        graph = str(script.graph_for(torch.randn(2, 4)))
    assert "_autocast_to_reduced_precision" in graph


def test_a_known_limit_what_ran_in_a_torch_region_first_keeps_its_casts() -> None:
    keep = Policy.load("torch").replace(ops={"linear": "fp32"})
    net, script = scripted()
    x = torch.randn(2, 4)
    with torch.autocast("cpu"):
        script(x)
    with precast.autocast("cpu", policy=keep):
        y = script(x)
    assert y.dtype is torch.float32
    assert not torch.equal(y, net(x)), (
        "PyTorch keeps such a graph; then docs/differences.md can say so no more"
    )


def test_the_pass_is_off_only_while_a_region_is_open() -> None:
    assert torchscript_pass()
    with precast.autocast("cpu"):
        with precast.autocast("cpu"):
            assert not torchscript_pass()
        assert not torchscript_pass()
    assert torchscript_pass()


def test_the_pass_stays_off_until_the_last_thread_has_left() -> None:
    inside, leave = threading.Event(), threading.Event()

    def elsewhere() -> None:
        with precast.autocast("cpu"):
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    assert inside.wait(10)
    with precast.autocast("cpu"):
        pass
    assert not torchscript_pass()
    leave.set()
    thread.join()
    assert torchscript_pass()
