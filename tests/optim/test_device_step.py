"""The step of weights in bfloat16 off the CPU: it waits no more often than PyTorch's, also to skip a step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import precast
from benchmarks.cuda_graphs import counted_waits
from precast.optim import bfloat16_weights
from precast.optim.compiled_step import CompiledStep
from precast.optim.low_precision_weights import LowPrecisionWeights
from tests.gpu.networks import scaled_step
from tests.grad_scaler.test_observers import Calls
from tests.support.scaling import bits

WIDTH = 160
LOWERED = partial(precast.autocast, "cuda", dtype=torch.float16)
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw fused": lambda ps: torch.optim.AdamW(ps, lr=1e-3, fused=True),
    "adamw foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-3, foreach=True),
    "sgd fused": lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9, fused=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.01),
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, scaled: bool
) -> list[tuple[Any, ...]]:
    """Train some steps, with a scaler also one that is skipped; return the bits of weights and states after each."""
    x, results = torch.linspace(-1, 1, 8 * WIDTH).reshape(8, WIDTH), []
    scaler = precast.GradScaler("cpu", init_scale=64.0, enabled=scaled)
    for number in range(6):
        optimizer.zero_grad()
        with precast.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).float().square().mean()
        scaler.scale(loss * (math.inf if scaled and number == 3 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        results.append(_state(model, optimizer))
    return results


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    states = [
        value
        for p in model.parameters()
        for value in optimizer.state[p].values()
        if isinstance(value, Tensor)
    ]
    return tuple(bits(each.cpu()) for each in [*model.parameters(), *states])


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_device_that_decides_gives_the_bits_of_a_host_that_waits(
    make: Callable[[Any], torch.optim.Optimizer], scaled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CompiledStep, "_is_candidate", lambda *_: False)
    results = []
    for on_device in (False, True):
        monkeypatch.setattr(
            LowPrecisionWeights, "_can_skip_on_device", lambda *_, result=on_device: result
        )
        model = network()
        optimizer = make(model.parameters())
        bfloat16_weights(model, optimizer)
        results.append(trained(model, optimizer, scaled=scaled))
    assert results[0] == results[1]


def test_a_step_that_the_device_skips_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a rounding error is a tie after it was rounded itself: rounding again would move the weight."""
    monkeypatch.setattr(CompiledStep, "_is_candidate", lambda *_: False)
    monkeypatch.setattr(LowPrecisionWeights, "_can_skip_on_device", lambda *_: True)
    model = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)
    optimizer = OPTIMIZERS["adamw fused"](model.parameters())
    bfloat16_weights(model, optimizer)
    weight = model.weight
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    with torch.no_grad():
        weight.data.fill_(1.0 + 2.0**-7)  # odd: a tie is rounded away from it
        optimizer.state[weight]["rounded_away"].fill_(2.0**-8)
    before = _state(model, optimizer)
    optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
    optimizer.grad_scale = torch.ones(())  # type: ignore[attr-defined]
    optimizer.step()
    assert _state(model, optimizer) == before


@pytest.mark.gpu
class TestOnGpu:
    def test_the_number_of_weights_adds_no_kernels(self) -> None:
        numbers = []
        for count in (2, 8):
            layers = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count))
            model = nn.Sequential(*layers).cuda()
            optimizer = OPTIMIZERS["adamw fused"](model.parameters())
            bfloat16_weights(model, optimizer)
            for _ in range(2):
                for p in model.parameters():
                    p.grad = torch.ones_like(p)
                with Calls() as calls:
                    optimizer.step()
            without_kernels = {"aten::detach", "aten::empty_like", "aten::alias", "aten::view"}
            names = calls.counts.keys() - without_kernels
            numbers.append(sum(calls.counts[name] for name in names))
        assert numbers[0] == numbers[1]

    @pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
    def test_it_does_not_warn_and_waits_as_often_as_pytorch(
        self, make: Callable[[Any], torch.optim.Optimizer]
    ) -> None:
        numbers = []
        for is_low in (False, True):
            model, x = network().cuda(), torch.ones(8, WIDTH, device="cuda")
            optimizer = make(model.parameters())
            scaler = precast.GradScaler("cuda", init_scale=64.0)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                if is_low:
                    bfloat16_weights(model, optimizer)
                step = scaled_step(model, x, optimizer, scaler, LOWERED)
                for _ in range(3):
                    step()
            with counted_waits() as waits:
                step()
            numbers += waits
        assert numbers[1] <= numbers[0]
