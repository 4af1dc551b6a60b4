"""Buffers that a skipped iteration wrote: put back if the scaler guards them, named in the diagnosis if it does not."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import precast
from precast.errors import ScalerError

Loop = Callable[[Any, Optimizer], object]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


def backward(scaler: Any, model: nn.Module, optimizer: Optimizer, factor: float = 1.0) -> None:
    """One forward pass in float16 and its backward; a factor of 1e5 overflows in the first layer."""
    optimizer.zero_grad()
    with precast.autocast("cpu", dtype=torch.float16):
        loss = model(torch.randn(16, 4) * factor).float().square().mean()
    scaler.scale(loss).backward()


def in_step(scaler: Any, optimizer: Optimizer) -> None:
    scaler.step(optimizer)


def after_unscale(scaler: Any, optimizer: Optimizer) -> None:
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


def after_clipping(scaler: Any, optimizer: Optimizer) -> None:
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)


PATHS: list[Any] = [
    pytest.param(loop, fused, id=f"{loop.__name__}{'-fused' * fused}")
    for loop in (in_step, after_unscale, after_clipping)
    for fused in (False, True)
]


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize(("step", "fused"), PATHS)
def test_statistics_of_a_skipped_iteration_are_put_back(step: Loop, fused: bool) -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.01, fused=fused)
    scaler = precast.GradScaler("cpu", init_scale=64.0, restore_buffers=model)
    good = buffers(model)
    for number in range(6):
        is_bad = number in {0, 3, 4}
        backward(scaler, model, optimizer, 1e5 if is_bad else 1.0)
        assert is_bad is not bool(model[1].running_var.isfinite().all())
        step(scaler, optimizer)
        scaler.update()
        event = scaler.last_step(optimizer)
        assert event is not None
        assert bool(event.skipped) is is_bad
        if is_bad:
            assert_same(buffers(model), good)
        else:
            assert not torch.equal(model[1].running_mean, good["1.running_mean"])
        good = buffers(model)
    assert int(model[1].num_batches_tracked) == 3


def test_without_the_option_they_stay_as_with_pytorch() -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.01)
    scaler = precast.GradScaler("cpu", init_scale=64.0)
    backward(scaler, model, optimizer, 1e5)
    scaler.step(optimizer)
    scaler.update()
    backward(scaler, model, optimizer)
    assert not bool(model[1].running_var.isfinite().all())


def test_all_forward_passes_of_an_accumulated_iteration_are_undone() -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.01)
    scaler = precast.GradScaler("cpu", init_scale=64.0, restore_buffers=[model])
    good = buffers(model)
    for factor in (1.0, 1e5, 1.0):
        backward(scaler, model, optimizer, factor)
    scaler.step(optimizer)
    scaler.update()
    if scaler.counters.skipped:
        assert_same(buffers(model), good)


@pytest.mark.parametrize("load", ["load_state_dict", "copy", "to"])
def test_what_is_loaded_before_the_first_forward_is_not_taken_back(load: str) -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.01)
    scaler = precast.GradScaler("cpu", init_scale=64.0, restore_buffers=model)
    other = network()
    with torch.no_grad():
        other[1].running_mean.fill_(7.0)
    if load == "load_state_dict":
        model.load_state_dict(other.state_dict())
    elif load == "copy":
        model[1].running_mean.copy_(other[1].running_mean)
    else:
        model[1].running_mean = other[1].running_mean.clone()
    backward(scaler, model, optimizer, 1e5)
    scaler.step(optimizer)
    scaler.update()
    assert model[1].running_mean.tolist() == [7.0] * 8


class Replaces(nn.Module):
    """A module whose forward pass assigns its buffer, in another shape each time."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, x.detach().max()[None]])
        return (x * self.weight).half()


@pytest.mark.parametrize("fused", [False, True])
def test_a_buffer_that_forward_replaces_is_put_back(fused: bool) -> None:
    model = Replaces()
    optimizer = SGD(model.parameters(), lr=0.01, fused=fused)
    scaler = precast.GradScaler("cpu", init_scale=64.0, restore_buffers=model)
    for factor in (1.0, 1e6, 1.0):
        backward(scaler, model, optimizer, factor)
        scaler.step(optimizer)
        scaler.update()
    assert model.seen.shape == (3,)
    assert float(model.seen.max()) < 100


def test_a_compiled_model_is_guarded() -> None:
    model = network()
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = SGD(model.parameters(), lr=0.01)
    scaler = precast.GradScaler("cpu", init_scale=64.0, restore_buffers=model)
    backward(scaler, compiled, optimizer)
    scaler.step(optimizer)
    scaler.update()
    good = buffers(model)
    backward(scaler, compiled, optimizer, 1e5)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.counters.skipped == 1
    assert_same(buffers(model), good)


def test_losses_with_scales_of_their_own_share_one_guard() -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.01)
    scalers = precast.LossScalers("cpu", ["fit", "penalty"], init_scale=64.0, restore_buffers=model)
    for factor in (1.0, 1e5, 1.0):
        good = buffers(model)
        optimizer.zero_grad()
        with precast.autocast("cpu", dtype=torch.float16):
            output = model(torch.randn(16, 4) * factor).float()
        scalers.backward("fit", output.square().mean(), optimizer, retain_graph=True)
        if factor != 1.0:
            scalers.backward("penalty", output.abs().mean(), optimizer)
        scalers.step(optimizer)
        scalers.update()
        if factor != 1.0:
            assert_same(buffers(model), good)


class Remembers(nn.Module):
    """A module whose output depends on a running mean, and has a mask that is infinite by design."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(y.float().mean(0), alpha=0.1)
        return y - self.mean


@pytest.mark.parametrize("fused", [False, True])
def test_the_verdict_names_a_spoilt_buffer_after_three_iterations(fused: bool) -> None:
    model = Remembers()
    attachment = precast.attach(model)
    optimizer = SGD(model.parameters(), lr=0.01, fused=fused)
    scaler = precast.GradScaler("cpu", init_scale=64.0)
    iterations = []

    def train() -> None:
        for iteration in range(10):
            iterations.append(iteration)
            backward(scaler, model, optimizer, 1e6 if iteration == 2 else 1.0)
            scaler.step(optimizer)
            scaler.update()

    with pytest.raises(precast.errors.BrokenModelError, match="restore_buffers=model") as caught:
        train()
    assert len(iterations) == 5
    assert caught.value.diagnosis.reason == "weights"
    assert "`mean`" in str(caught.value)
    assert "mask" not in str(caught.value)
    attachment.detach()


def test_a_mask_alone_gives_no_verdict() -> None:
    model = Remembers()
    attachment = precast.attach(model)
    optimizer = SGD(model.parameters(), lr=0.01)
    scaler = precast.GradScaler("cpu", init_scale=64.0, restore_buffers=model)
    for _ in range(6):
        backward(scaler, model, optimizer, 1e6)
        scaler.step(optimizer)
        scaler.update()
    attachment.detach()


def test_a_scaler_that_is_off_and_copies_guard_nothing() -> None:
    model = network()
    off = precast.GradScaler("cpu", enabled=False, restore_buffers=model)
    assert not any(m._forward_pre_hooks for m in model.modules())
    scaler = precast.GradScaler("cpu", restore_buffers=model)
    assert model[1]._forward_pre_hooks
    for other in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert len(pickle.dumps(other)) < 5000, "the model is not in it"
        assert len(model[1]._forward_pre_hooks) == 1
    del scaler, off
    gc.collect()
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(ScalerError, match="restore_buffers takes a"):
        precast.GradScaler("cpu", restore_buffers=network().parameters())  # type: ignore[arg-type]
    with pytest.raises(ScalerError, match="restore_buffers"):
        precast.GradScaler("cpu", restore_buffers=3)  # type: ignore[arg-type]
