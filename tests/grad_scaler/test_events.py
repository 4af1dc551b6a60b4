"""What a step says: its event, names of offenders, the loss, history, counters, schedulers, clipping."""

from __future__ import annotations

import dataclasses
import math
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import precast
from precast._internal.events import StepEvent, observe
from precast.grad_scaler.scaler import GradScaler
from tests.support.scaling import KINDS, bits, make_parameter, sgd, started

Tensor = torch.Tensor


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def take(scaler: GradScaler, model: nn.Module, optimizer: Any, bad: tuple[str, ...] = ()) -> None:
    """An iteration in which the gradients named in `bad` are broken."""
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(2, 3)).sum()).backward()
    for name in bad:
        model.get_parameter(name).grad.flatten()[0] = math.nan  # type: ignore[union-attr]
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("kind", KINDS)
def test_the_latest_step_says_what_it_did(kind: str) -> None:
    model = network()
    optimizer = KINDS[kind](list(model.parameters()))
    scaler = GradScaler("cpu", init_scale=8.0)
    assert scaler.last_step(optimizer) is None
    take(scaler, model, optimizer)
    event = scaler.last_step(optimizer)
    assert event is not None
    assert (event.step, float(event.scale), bool(event.skipped)) == (0, 8.0, False)
    assert (event.nonfinite, event.names, event.loss_finite) == (0, (), True)
    take(scaler, model, optimizer, bad=("2.weight", "0.bias"))
    event = scaler.last_step(optimizer)
    assert event is not None
    assert (event.step, float(event.scale), bool(event.skipped)) == (1, 8.0, True)
    assert event.names == ("group 0, parameter 1", "group 0, parameter 2")
    assert (event.nonfinite, event.loss_finite) == (2, True)
    assert 0 < event.seconds < 60
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.step = 3  # type: ignore[misc]


def test_names_come_from_the_attached_model_or_from_the_optimizer() -> None:
    model = network()
    optimizer = torch.optim.SGD([(f"mine.{n}", p) for n, p in model.named_parameters()], lr=0.1)
    scaler = GradScaler("cpu")
    for attach, name in ((False, "mine.2.weight"), (True, "2.weight"), (False, "mine.2.weight")):
        attachment = precast.attach(model, hold=False) if attach else None
        take(scaler, model, optimizer, bad=("2.weight",))
        event = scaler.last_step(optimizer)
        assert event is not None
        assert event.names == (name,)
        if attachment is not None:
            attachment.detach()


@pytest.mark.parametrize("numbers", [1, 1000])
@pytest.mark.parametrize(("loss", "finite"), [(1.0, True), (math.inf, False), (math.nan, False)])
def test_whether_the_loss_itself_was_finite(loss: float, finite: bool, numbers: int) -> None:
    parameter = make_parameter()
    optimizer = sgd(parameter)
    scaler = GradScaler("cpu")
    broken = torch.ones(numbers)
    broken[-1] = loss
    scaler.scale(broken * parameter.sum().detach().sign().abs())
    parameter.grad = torch.full_like(parameter, math.inf)
    scaler.step(optimizer)
    event = scaler.last_step(optimizer)
    assert event is not None
    assert event.skipped
    assert event.loss_finite is finite


def test_a_scaled_loss_that_overflows_is_not_a_bad_loss() -> None:
    scaler, parameter, optimizer = started(init_scale=2.0**100)
    optimizer.zero_grad()
    scaler.scale((parameter * 1e10).abs().sum()).backward()
    scaler.step(optimizer)
    event = scaler.last_step(optimizer)
    assert event is not None
    assert event.skipped
    assert event.loss_finite


def test_finding_names_costs_nothing_where_nothing_was_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[int] = []
    monkeypatch.setattr(
        "precast.grad_scaler.nonfinite.bad_gradients", lambda optimizer: looked.append(1) or []
    )
    model = network()
    optimizer = sgd(model[0].weight)
    scaler = GradScaler("cpu")
    take(scaler, model, optimizer)
    event = scaler.last_step(optimizer)
    assert event is not None
    assert event.names == ()
    assert not looked
    take(scaler, model, optimizer, bad=("0.weight",))
    assert looked


def test_a_sum_that_overflows_is_not_an_offender() -> None:
    scaler, parameter, _ = started()
    other = make_parameter()
    parameter.grad = torch.full_like(parameter, 3e38)
    other.grad = torch.full_like(other, math.inf)
    optimizer = torch.optim.SGD([parameter, other], lr=0.1)
    scaler.update(1.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    event = scaler.last_step(optimizer)
    assert event is not None
    assert event.names == ("group 0, parameter 1",)


def test_history_is_bounded_and_holds_no_graph() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", history=3)
    for _ in range(5):
        take(scaler, model, optimizer)
    assert [event.step for event in scaler.history] == [2, 3, 4]
    losses = [loss for event in scaler.history for loss in event.details._losses]
    assert len(losses) == 3
    assert all(loss.grad_fn is None for loss in losses)
    assert not GradScaler("cpu", history=0).history
    outputs = model(torch.ones(200, 3))  # one number of which is a loss
    scaler.scale(outputs[0, 0]).backward()
    scaler.step(optimizer)
    (loss,) = scaler.history[-1].details._losses
    assert loss.untyped_storage().nbytes() == 4


@pytest.mark.parametrize("kind", ["sgd", "fused adam"])
def test_counters(kind: str) -> None:
    model = network()
    optimizers = [KINDS[kind]([p]) for p in (model[0].weight, model[2].weight)]
    scaler = GradScaler("cpu", growth_interval=2)
    for bad in (False, False, True, True, False):
        scaler.scale(model(torch.ones(2, 3)).sum()).backward()
        if bad:
            model[2].weight.grad[:] = math.inf  # type: ignore[union-attr,index]
        for optimizer in optimizers:
            scaler.step(optimizer)
        if scaler._iterations == 3:
            before = scaler.counters
            assert (before.skipped, before.consecutive_skips) == (1, 1)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert dataclasses.asdict(scaler.counters) == {
        "steps": 10,
        "skipped": 2,
        "consecutive_skips": 0,
        "growths": 1,
        "backoffs": 2,
    }
    assert scaler.get_scale() == 2.0**15
    assert pickle.loads(pickle.dumps(scaler)).counters == scaler.counters


def test_growths_are_counted_as_the_tracker_counts_them() -> None:
    scaler, parameter, optimizer = started(growth_interval=3)
    for turn in range(12):
        parameter.grad = torch.ones_like(parameter)
        if turn == 4:
            parameter.grad[0] = math.inf
        scaler.step(optimizer)
        scaler.update(1024.0 if turn == 7 else None)
        if turn == 8:
            scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": 1})
        assert scaler._step_history.good_iterations == scaler._get_growth_tracker()
        scaler.scale(torch.ones(()))
    assert scaler.counters.growths == 3


def test_events_come_to_observers_with_verdicts() -> None:
    seen: list[Any] = []
    scaler = GradScaler("cpu", 2.0**-14, max_consecutive_skips=1, on_diagnosis="ignore")
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with observe(seen.append):
        take(scaler, model, optimizer, bad=("0.bias",))
    step, diagnosis = seen
    assert isinstance(step, StepEvent)
    assert isinstance(diagnosis, precast.events.ScalerDiagnosis)
    assert (diagnosis.reason, diagnosis.step, diagnosis.scale) == ("skips", 0, 2.0**-14)
    assert diagnosis.names == ("group 0, parameter 1",)


# --- what a step is asked for ---


@pytest.mark.parametrize("kind", ["sgd", "fused adam"])
def test_a_scheduler_advances_only_with_its_optimizer(kind: str) -> None:
    model = network()
    optimizer = KINDS[kind](list(model.parameters()))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    scaler = GradScaler("cpu")
    take(scaler, model, optimizer, bad=("0.bias",))
    assert scaler.advance(scheduler) is False
    assert scheduler.last_epoch == 0
    take(scaler, model, optimizer)
    assert scaler.advance(scheduler) is True
    assert scheduler.last_epoch == 1
    off = GradScaler("cpu", enabled=False)
    assert off.advance(scheduler) is True


@pytest.mark.parametrize("unscaled_before", [False, True])
@pytest.mark.parametrize("kind", ["sgd", "fused adam"])
def test_clipping_in_one_call(kind: str, unscaled_before: bool) -> None:
    models = [network(), network()]
    models[1].load_state_dict(models[0].state_dict())
    found = []
    for model, clip in zip(models, (True, False), strict=True):
        optimizer = KINDS[kind](list(model.parameters()))
        scaler = GradScaler("cpu")
        scaler.scale(model(torch.ones(2, 3)).sum()).backward()
        if unscaled_before or not clip:
            scaler.unscale_(optimizer)
        by_hand = nn.utils.clip_grad_norm_
        norm = (
            scaler.clip_grad_norm_(optimizer, 0.25) if clip else by_hand(model.parameters(), 0.25)
        )
        scaler.step(optimizer)
        scaler.update()
        found.append([bits(norm), *map(bits, model.parameters())])
    assert found[0] == found[1]
    assert norm > 0.25


@pytest.mark.parametrize("enabled", [True, False])
def test_finite_gradients_whose_norm_overflows_become_0_as_in_pytorch(enabled: bool) -> None:
    parameter, by_hand = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = GradScaler("cpu", init_scale=2.0, enabled=enabled)
    scaler.scale(parameter.sum() * 1e20).backward()
    (by_hand.sum() * 1e20).backward()
    assert scaler.clip_grad_norm_(optimizer, 1.0).isinf()
    nn.utils.clip_grad_norm_([by_hand], 1.0)
    assert bits(parameter.grad) == bits(by_hand.grad)
    scaler.step(optimizer)
    assert parameter.tolist() == [1.0, 1.0]


def test_clipping_with_a_scaler_that_is_off_and_of_bad_gradients() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    off = GradScaler("cpu", enabled=False)
    model(torch.ones(2, 3)).sum().backward()
    total = torch.stack([p.grad.norm() for p in model.parameters()]).norm()  # type: ignore[union-attr]
    assert torch.allclose(off.clip_grad_norm_(optimizer, 1e9), total)
    scaler, parameter, optimizer = started()
    before = bits(parameter)
    other = make_parameter()
    other.grad = torch.ones_like(other)
    optimizer.add_param_group({"params": [other]})
    parameter.grad[0] = math.inf
    assert scaler.clip_grad_norm_(optimizer, 1.0).isinf()
    scaler.step(optimizer)
    assert bits(parameter) == before
    event = scaler.last_step(optimizer)
    assert event is not None
    assert event.names == ("group 0, parameter 0",), "clipping has not spread it"
