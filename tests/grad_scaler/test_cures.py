"""The advice in the scaler's errors and diagnoses, followed on programs that have the fault."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import precast
from precast._internal import cures
from precast.errors import BrokenModelError, PrecastWarning, ScalerError


def _scaled(model: nn.Module, scaler: Any, factor: float = 1.0) -> None:
    scaler.scale(model(torch.ones(2, 4) * factor).square().mean()).backward()


def _clip(model: nn.Module) -> float:
    return float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 1)


@pytest.fixture
def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


@pytest.fixture
def scaler() -> precast.GradScaler:
    return precast.GradScaler("cpu", init_scale=1024.0)


# --- calls in the wrong order ---


@pytest.mark.trial("UPDATE_MISSING")
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_step_skipped_by_hand_needs_update(
    model: nn.Module, optimizer: Any, scaler: Any, set_to_none: bool
) -> None:
    def train(*, follows: bool) -> None:
        for step in range(4):
            optimizer.zero_grad(set_to_none)
            _scaled(model, scaler, 100.0 if step == 1 else 1.0)
            scaler.unscale_(optimizer)
            if _clip(model) > 50:
                if follows:
                    scaler.update()
                continue
            scaler.step(optimizer)
            scaler.update()

    with pytest.raises(ScalerError) as caught:
        train(follows=False)
    assert str(caught.value).endswith(cures.UPDATE_MISSING.text)
    scaler.update()
    train(follows=True)
    assert scaler.counters.skipped == 0


@pytest.mark.trial("UPDATE_MISSING")
def test_accumulated_gradients_are_unscaled_once(
    model: nn.Module, optimizer: Any, scaler: Any
) -> None:
    def train(*, follows: bool) -> None:
        optimizer.zero_grad()
        for part in range(3):
            _scaled(model, scaler)
            if not follows or part == 2:
                scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    with pytest.raises(ScalerError) as caught:
        train(follows=False)
    assert str(caught.value).endswith(cures.UPDATE_MISSING.text)
    scaler.update()
    train(follows=True)
    assert scaler.counters.skipped == 0


def _unscale_twice(model: nn.Module, optimizer: Any, scaler: Any) -> None:
    _scaled(model, scaler)
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


def _unscale_late(model: nn.Module, optimizer: Any, scaler: Any) -> None:
    _scaled(model, scaler)
    scaler.step(optimizer)
    scaler.unscale_(optimizer)


def _in_order(model: nn.Module, optimizer: Any, scaler: Any) -> None:
    optimizer.zero_grad()
    _scaled(model, scaler)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.trial("UNSCALE_ONCE")
def test_unscale_once(model: nn.Module, optimizer: Any, scaler: Any) -> None:
    _is_mended(_unscale_twice, cures.UNSCALE_ONCE, model, optimizer, scaler)


@pytest.mark.trial("UNSCALE_BEFORE_STEP")
def test_unscale_before_step(model: nn.Module, optimizer: Any, scaler: Any) -> None:
    _is_mended(_unscale_late, cures.UNSCALE_BEFORE_STEP, model, optimizer, scaler)


@pytest.mark.trial("UPDATE_ONCE")
def test_update_after_the_steps(model: nn.Module, optimizer: Any, scaler: Any) -> None:
    def twice(model: nn.Module, optimizer: Any, scaler: Any) -> None:
        for _ in range(2):
            _scaled(model, scaler)
            scaler.step(optimizer)

    _is_mended(twice, cures.UPDATE_ONCE, model, optimizer, scaler)


def _is_mended(
    wrong: Callable[..., None], cure: cures.Cure, model: nn.Module, optimizer: Any, scaler: Any
) -> None:
    with pytest.raises(ScalerError) as caught:
        wrong(model, optimizer, scaler)
    assert str(caught.value).endswith(cure.text)
    scaler.update()
    for _ in range(3):
        _in_order(model, optimizer, scaler)
    assert scaler.counters.skipped == 0


@pytest.mark.trial("UPDATE_FIRST")
def test_update_before_the_backward_of_a_loss(model: nn.Module, optimizer: Any) -> None:
    scalers = precast.LossScalers("cpu", ["fit"], init_scale=1024.0)

    def train(*, follows: bool) -> None:
        for _ in range(3):
            optimizer.zero_grad()
            scalers.backward("fit", model(torch.ones(2, 4)).square().mean(), optimizer)
            scalers.step(optimizer)
            if follows:
                scalers.update()

    with pytest.raises(ScalerError) as caught:
        train(follows=False)
    assert str(caught.value).endswith(cures.UPDATE_FIRST.text)
    scalers.update()
    train(follows=True)


@pytest.mark.trial("UNSCALE_LAST")
def test_unscale_after_the_last_backward(model: nn.Module, optimizer: Any, scaler: Any) -> None:
    _scaled(model, scaler)
    scaler.unscale_(optimizer)
    _scaled(model, scaler)
    with pytest.raises(ScalerError) as caught:
        scaler.step(optimizer)
    assert str(caught.value).endswith(cures.UNSCALE_LAST.text)
    optimizer.zero_grad()
    scaler.update()
    _in_order(model, optimizer, scaler)
    assert scaler.counters.skipped == 0


@pytest.mark.trial("CLIP_IN_CLOSURE")
def test_a_closure_clips_scaled_gradients(model: nn.Module, scaler: Any) -> None:
    optimizer, norms = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=2), []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4) * 100).square().mean()
        scaler.scale(loss).backward()
        most = 1.0 * scaler.get_scale()
        nn.utils.clip_grad_norm_(model.parameters(), most)
        norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters()]) / most)
        return loss

    _scaled(model, scaler)
    scaler.unscale_(optimizer)
    with pytest.raises(ScalerError) as caught:
        scaler.step(optimizer, closure)
    assert str(caught.value).endswith(cures.CLIP_IN_CLOSURE.text)
    scaler.update()
    norms.clear()
    scaler.step(optimizer, closure)
    scaler.update()
    assert max(norms) == pytest.approx(1.0, rel=1e-3)


@pytest.mark.trial("FLOAT32_PARAMETERS")
def test_float32_parameters_keep_small_gradients() -> None:
    def gradients(dtype: torch.dtype) -> Tensor:
        layer = nn.Linear(4, 1).to(dtype)
        optimizer = torch.optim.SGD(layer.parameters())
        scaler = precast.GradScaler("cpu", init_scale=2.0**14)
        with precast.autocast("cpu", dtype=torch.float16):
            loss = layer(torch.ones(2, 4, dtype=dtype)).float().mean() * 1e-8
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        assert layer.weight.grad is not None
        return layer.weight.grad

    with pytest.warns(PrecastWarning) as caught:
        assert not gradients(torch.float16).any()
    assert str(caught[0].message).endswith(cures.FLOAT32_PARAMETERS.text)
    assert torch.allclose(gradients(torch.float32), torch.tensor(1e-8), rtol=1e-2)


# --- diagnoses ---


class Average(nn.Module):
    """A layer whose output is divided by a moving average, which forward updates."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("size", torch.ones(4))
        self.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))

    size: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x).float()
        with torch.no_grad():
            self.size.mul_(0.9).add_((x - x.mean()).abs().mean(0), alpha=0.1)
        return x / self.size


def _train_average(model: nn.Module, **settings: Any) -> precast.GradScaler:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    scaler = precast.GradScaler("cpu", init_scale=16.0, **settings)
    for step in range(10):
        optimizer.zero_grad()
        x = torch.ones(2, 4) * (1e6 if step == 2 else 1.0) * torch.tensor([1.0, 2.0, 3.0, 4.0])
        with precast.autocast("cpu", dtype=torch.float16):
            loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler


@pytest.mark.trial("BROKEN_BUFFERS")
@pytest.mark.parametrize("watch", [precast.attach, precast.monitor])
def test_a_buffer_that_a_skipped_step_made_nan_is_named(watch: Any) -> None:
    torch.manual_seed(0)
    model = Average()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    watched = watch(model)
    with pytest.raises(BrokenModelError) as caught:
        _train_average(model)
    assert "iteration 4 was skipped" in str(caught.value), "after three iterations"
    assert "`size`" in str(caught.value)
    assert "`mask`" not in str(caught.value), "its infinity is meant"
    assert cures.BROKEN_BUFFERS.text in str(caught.value)
    assert caught.value.diagnosis.reason == "weights"  # type: ignore[attr-defined]
    watched.detach()
    model.load_state_dict(before)
    assert _train_average(model, restore_buffers=model).counters.skipped == 1


@pytest.mark.trial("BROKEN_PARAMETERS")
def test_a_checkpoint_from_before_and_a_lower_learning_rate(model: nn.Module) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def train(lr: float) -> precast.GradScaler:
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        scaler = precast.GradScaler("cpu", init_scale=16.0)
        for _ in range(60):
            _in_order(model, optimizer, scaler)
        return scaler

    with pytest.raises(BrokenModelError) as caught:
        train(1e30)
    assert cures.BROKEN_PARAMETERS.text in str(caught.value)
    model.load_state_dict(before)
    assert train(0.01).counters.skipped == 0


@pytest.mark.trial("BAD_LOSSES")
def test_the_logarithm_in_the_loss_is_at_fault(model: nn.Module, optimizer: Any) -> None:
    def train(least: float) -> precast.GradScaler:
        scaler = precast.GradScaler("cpu", max_nonfinite_losses=2)
        for _ in range(5):
            optimizer.zero_grad()
            scaler.scale(model(torch.zeros(2, 4)).mul(0).clamp(min=least).log().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        return scaler

    with pytest.raises(BrokenModelError) as caught:
        train(0.0)
    assert cures.BAD_LOSSES.text in str(caught.value)
    assert train(1e-6).counters.skipped == 0


def _large_gradients(model: nn.Module, **settings: Any) -> precast.GradScaler:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    scaler = precast.GradScaler("cpu", **settings)
    for _ in range(60):
        optimizer.zero_grad()
        with precast.autocast("cpu", dtype=torch.float16):
            output = model(torch.ones(2, 4))
        scaler.scale(output.float().sum() * 1000).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler


@pytest.mark.trial("STUCK_SCALE")
def test_a_lower_limit_lets_the_scale_fall(model: nn.Module) -> None:
    with pytest.raises(BrokenModelError) as caught:
        _large_gradients(model, min_scale=2.0**12)
    assert cures.STUCK_SCALE.text in str(caught.value)
    assert _large_gradients(model).counters.skipped < 15


@pytest.mark.trial("MANY_SKIPS")
def test_a_higher_limit_or_a_lower_first_scale(model: nn.Module) -> None:
    with pytest.raises(BrokenModelError) as caught:
        _large_gradients(model, max_consecutive_skips=5)
    assert cures.MANY_SKIPS.text in str(caught.value)
    assert _large_gradients(model, max_consecutive_skips=20).counters.skipped
    assert not _large_gradients(model, max_consecutive_skips=5, init_scale=16.0).counters.skipped
