"""Compiled by Inductor, products in 8 bits and their gradients are those of eager, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import precast
from precast import _torch
from precast.engine import float8_kernels
from precast.policy.policy import Policy


@pytest.mark.skipif(
    _torch.VERSION < (2, 12),
    reason="PyTorch 2.11 leaves out a rounding that is followed by a cast back, whatever its options say",
)
def test_inductor_computes_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not leave out the rounding to 16 bits: a number may then fall on the other side of a step in 8 bits."""
    monkeypatch.setattr(float8_kernels, "_warned", {"cpu"})
    policy = Policy.load("default").replace(ops={"linear": "float8_rowwise"})
    torch.manual_seed(0)
    eager = nn.Linear(40, 48)
    compiled = copy.deepcopy(eager)
    call = torch.compile(compiled, fullgraph=True, options={"emulate_precision_casts": True})
    x = torch.randn(9, 40, requires_grad=True)
    found = []
    for module in (eager, call):
        with precast.autocast("cpu", torch.bfloat16, policy=policy):
            result = module(x)
        (gradient,) = torch.autograd.grad(result.float().square().sum(), x, retain_graph=True)
        result.float().square().sum().backward()
        found.append((result, gradient))
    assert all(one.equal(other) for one, other in zip(*found, strict=True))
    assert eager.weight.grad is not None
    assert compiled.weight.grad is not None
    assert eager.weight.grad.equal(compiled.weight.grad)
