"""Zeros that underflow made, against float64 computations of the same network."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import precast

Keys = dict[tuple[str, str], dict[str, Any]]
Tensors = dict[tuple[str, str], Tensor]


def train_in_float16(
    model: nn.Module, x: Tensor, weight: Tensor, factor: float = 1.0
) -> tuple[Keys, Tensors]:
    """One step in float16: what the monitor says of it, and the tensors themselves."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen = noted(model)
    with precast.monitor(model) as monitor:
        with precast.autocast("cpu", dtype=torch.float16):
            out = model(x)
        (out * weight.to(out.dtype)).float().sum().mul(factor).backward()
        optimizer.step()
    seen |= {("parameter", n): p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {(e["kind"], e["name"]): e for e in monitor.to_dict()["modules"]}, seen


def noted(model: nn.Module) -> Tensors:
    """What a network's modules will give, and the gradients of that."""
    found: Tensors = {}
    for name, module in model.named_children():

        def note(_module: Any, _args: Any, output: Tensor, name: str = name) -> None:
            found["output", name] = output.detach().clone()
            output.register_hook(lambda g: found.update({("gradient", name): g.clone()}))

        module.register_forward_hook(note)
    return found


def gradients_in_float64(model: nn.Module, x: Tensor, weight: Tensor, factor: float) -> Tensors:
    """The same in float64."""
    exact = copy.deepcopy(model).double()
    found = noted(exact)
    (exact(x.double()) * weight.double()).sum().mul(factor).backward()
    return found | {
        ("parameter", n): p.grad for n, p in exact.named_parameters() if p.grad is not None
    }


def lost_in(exact: Tensor) -> int:
    """Numbers that float16 makes zero of."""
    return int(((exact != 0) & (exact.abs() <= 2.0**-25)).sum())


def small(module: nn.Module, power: int) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2.0**power)
    return module


@pytest.mark.parametrize("power", [-12, -14, -16, -24])
def test_the_share_of_gradients_that_underflow_is_that_of_float64(power: int) -> None:
    """A network that loses gradients on the way back, a part of them or all, and by ReLU's zeros no more."""
    torch.manual_seed(power)
    model = nn.Sequential(
        nn.Linear(32, 48, bias=False),
        nn.ReLU(),
        small(nn.Linear(48, 40, bias=False), power // 2),
        nn.Tanh(),
        small(nn.Linear(40, 24, bias=False), power // 2),
    )
    x, weight, factor = torch.randn(64, 32), torch.randn(64, 24) / 16, 2.0**-8
    exact = gradients_in_float64(model, x, weight, factor)
    found, here = train_in_float16(model, x, weight, factor)
    for key in (("gradient", "3"), ("gradient", "1"), ("gradient", "0"), ("parameter", "0.weight")):
        entry = found[key]
        share = entry["underflow_zeros"][0] / entry["elements"][0]
        expected = float(((here[key] == 0) & (exact[key] != 0)).double().mean())
        # Not exact: ReLU sees rounded numbers, so that some of float16's are not above zero that float64's are.
        assert math.isclose(share, expected, abs_tol=0.002), key
        assert entry["zeros"] == [int((here[key] == 0).sum())]
    share = found["gradient", "0"]["underflow_zeros"][0] / found["gradient", "0"]["elements"][0]
    assert found["gradient", "0"]["zeros"][0] > found["gradient", "0"]["underflow_zeros"][0], (
        "of ReLU"
    )
    if power == -24:
        assert found["parameter", "0.weight"]["underflow_zeros"] == [32 * 48]
    if power == -12:
        assert 0.01 < share < 0.5


MODULES: list[Callable[[], tuple[nn.Module, Tensor]]] = [
    lambda: (nn.Linear(16, 24, bias=False), torch.randn(8, 3, 16)),
    lambda: (nn.Conv1d(8, 16, 3, bias=False), torch.randn(4, 8, 20)),
    lambda: (nn.Conv2d(8, 16, 3, 2, 1, groups=2, bias=False), torch.randn(4, 8, 9, 9)),
    lambda: (nn.Conv3d(4, 8, 2, bias=False), torch.randn(2, 4, 5, 5, 5)),
]


@pytest.mark.parametrize("make", MODULES)
def test_outputs_and_parameters_that_underflow(
    make: Callable[[], tuple[nn.Module, Tensor]],
) -> None:
    """Every second input is tiny; the result is compared number by number with float64's."""
    torch.manual_seed(0)
    module, x = make()
    small(module, -8)
    x[1::2] *= 2.0**-18
    x = x.half().float()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.half())
    model = nn.Sequential(module)
    with precast.monitor(model) as monitor, precast.autocast("cpu", dtype=torch.float16):
        out = model(x)
        out.float().sum().mul(2.0**-6).backward()
        monitor.end_step()
    assert out.dtype is torch.float16
    found = {(e["kind"], e["name"]): e for e in monitor.to_dict()["modules"]}
    exact = copy.deepcopy(module).double()(x.double())
    assert found["output", "0"]["underflow_zeros"] == [int(((out == 0) & (exact != 0)).sum())]
    assert found["output", "0"]["underflow_zeros"][0] > 10
    weight = found["parameter", "0.weight"]
    gradient = module.weight.grad
    assert isinstance(gradient, Tensor)
    assert weight["underflow_zeros"][0] == int((gradient == 0).sum())


def test_zeros_that_are_meant_are_not_lost() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    x = torch.randn(8, 16)
    x[3:] = 0.0
    found, _ = train_in_float16(model, x, torch.randn(8, 16))
    assert found["output", "1"]["zeros"][0] > 50
    assert found["output", "1"]["underflow_zeros"] == [0]
    assert found["gradient", "0"]["zeros"][0] > 50
    assert found["gradient", "0"]["underflow_zeros"] == [0]


def test_nothing_is_said_where_nothing_is_known() -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.softplus(x) * 2.0**-30

    model = nn.Sequential(nn.Linear(16, 32), Own())
    found, _ = train_in_float16(model, torch.randn(8, 16), torch.randn(8, 32))
    for key in (("output", "1"), ("gradient", "1"), ("gradient", "0")):
        assert found[key]["underflow_known"] == [False]
        assert found[key]["underflow_zeros"] == [0]
    assert found["output", "0"]["underflow_known"] == [True]


def test_a_tensor_that_two_modules_take() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8, bias=False)
            self.a, self.b = small(nn.Linear(8, 8), -20), small(nn.Linear(8, 8), -20)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            found: Tensor = self.a(y) + self.b(y)
            return found

    model = Two()
    found, _ = train_in_float16(model, torch.randn(8, 8), torch.full((8, 8), 2.0**-10))
    assert found["gradient", "first"]["underflow_zeros"] == [64]
    assert found["parameter", "first.weight"]["underflow_zeros"] == [64]


def test_no_scale_is_what_the_monitor_says_a_scale_would_mend() -> None:
    """What the best scale leaves is what a run under that scale loses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
    x, weight = torch.randn(64, 16), torch.randn(64, 16)
    with precast.monitor(model) as monitor:
        (model(x) * weight).sum().mul(2.0**-22).backward()
        monitor.end_step()
    said = {(e["kind"], e["name"]): e["what_if"]["float16"] for e in monitor.to_dict()["modules"]}
    exact = gradients_in_float64(model, x, weight, 2.0**-22)
    for key in (("gradient", "1"), ("parameter", "0.weight"), ("parameter", "2.weight")):
        expected = lost_in(exact[key]) / exact[key].numel()
        assert 0.01 < expected < 1
        assert said[key]["underflow"] == pytest.approx(expected, abs=2e-3)
        best = said[key]["best_scale"]
        assert exact[key].abs().max() * best <= 65504 * (1 + 1e-5)
        assert (
            said[key]["with_best"]["underflow"] == lost_in(exact[key] * best) / exact[key].numel()
        )
