"""The scaler as a drop-in: order of calls, closures, being off, settings, states."""

from __future__ import annotations

import copy
import dataclasses
import gc
import inspect
import math
import pickle
import re
from typing import Any

import pytest
import torch

from precast.errors import PrecastWarning, ScalerError
from precast.grad_scaler.scaler import GradScaler
from tests.support.scaling import make_parameter, sgd, started

Tensor = torch.Tensor


# --- order of calls ---


def test_calls_before_any_loss_was_scaled() -> None:
    scaler, optimizer = GradScaler("cpu"), sgd(make_parameter())
    for call in (lambda: scaler.unscale_(optimizer), lambda: scaler.step(optimizer), scaler.update):
        with pytest.raises(ScalerError, match=r"before any loss was scaled.*scale\(loss\)"):
            call()


def test_unscaling_twice() -> None:
    scaler, _, optimizer = started()
    scaler.unscale_(optimizer)
    with pytest.raises(ScalerError, match="twice"):
        scaler.unscale_(optimizer)


def test_unscaling_after_the_step() -> None:
    scaler, _, optimizer = started()
    scaler.step(optimizer)
    with pytest.raises(ScalerError, match="after step"):
        scaler.unscale_(optimizer)


def test_two_steps_in_one_iteration() -> None:
    scaler, _, optimizer = started()
    scaler.step(optimizer)
    with pytest.raises(ScalerError, match=r"twice.*update\(\)"):
        scaler.step(optimizer)
    scaler.update()
    scaler.step(optimizer)


def test_no_gradients_to_check() -> None:
    scaler, _, _ = started()
    with pytest.raises(ScalerError, match="no gradients were checked"):
        scaler.step(sgd(make_parameter()))
    with pytest.raises(ScalerError, match="no gradients were checked"):
        scaler.update()
    scaler.update(4.0)
    assert scaler.get_scale() == 4.0


def test_an_optimizer_made_within_an_iteration_is_never_mistaken_for_a_dead_one() -> None:
    assert mistaken(torch.amp.GradScaler) > 0  # keyed by the id of a dead optimizer
    assert mistaken(GradScaler) == 0


def mistaken(kind: type[Any]) -> int:
    """How often a scaler took a new optimizer, which may lie where a dead one did, for that one."""
    scaler, count = kind("cpu"), 0
    scaler.scale(torch.ones(1))
    for _ in range(300):
        parameter = make_parameter()
        parameter.grad = torch.ones_like(parameter)
        optimizer = sgd(parameter)
        try:
            scaler.step(optimizer)
        except RuntimeError:  # "step() has already been called"
            count += 1
        del optimizer
        gc.collect(0)  # an optimizer is in a cycle
    return count


def test_an_optimizer_need_not_be_hashable() -> None:
    """As a dataclass of optimizers is not."""
    parameter = make_parameter()
    before = parameter.detach().clone()
    both: Any = Both([sgd(parameter)])
    scaler = GradScaler("cpu")
    scaler.scale(parameter.sum()).backward()
    scaler.step(both)
    scaler.update()
    assert torch.equal(parameter, before - 0.25)
    event = scaler.last_step(both)
    assert event is not None
    assert not event.skipped
    assert scaler.last_step(Both(both.parts)) is None  # type: ignore[arg-type]


@dataclasses.dataclass
class Both:
    parts: list[torch.optim.Optimizer]

    @property
    def param_groups(self) -> list[Any]:
        return [group for part in self.parts for group in part.param_groups]

    def step(self) -> None:
        for part in self.parts:
            part.step()


# --- closures ---


@pytest.mark.parametrize("how", [((None,), {}), ((), {"closure": None})])
def test_no_closure_is_not_a_closure(how: Any) -> None:
    args, kwargs = how
    scaler, parameter, optimizer = started()
    before = parameter.detach().clone()
    scaler.step(optimizer, *args, **kwargs)
    assert not torch.equal(parameter, before)


# --- a scaler that is off ---


def test_a_disabled_scaler_passes_everything_through() -> None:
    scaler = GradScaler("cpu", enabled=False)
    parameter = make_parameter()
    before, optimizer = parameter.detach().clone(), sgd(parameter)
    outputs = [parameter.sum(), "anything"]
    assert scaler.scale(outputs) is outputs
    outputs[0].backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    scaler.update(new_scale=3.0)
    assert torch.equal(parameter, before - 0.25)
    assert scaler.step(optimizer, lambda: 7.0) == 7.0  # its own step, so its own closures
    scaler.load_state_dict({"scale": 3.0})
    assert scaler.get_scale() == 1.0


def test_a_disabled_scaler_answers_every_getter() -> None:
    names = [n for n in dir(torch.amp.GradScaler) if n.startswith("get_")]
    assert set(names) == {
        "get_scale",
        "get_growth_factor",
        "get_backoff_factor",
        "get_growth_interval",
    }
    mute = []
    for name in names:
        try:
            getattr(torch.amp.GradScaler("cpu", enabled=False), name)()
        except AttributeError:
            mute.append(name)
    assert sorted(mute) == ["get_backoff_factor", "get_growth_factor", "get_growth_interval"]

    ours = GradScaler("cpu", 8.0, 3.0, 0.25, 7, enabled=False)
    answers = {name: getattr(ours, name)() for name in names}
    assert answers == {
        "get_scale": 1.0,
        "get_growth_factor": 3.0,
        "get_backoff_factor": 0.25,
        "get_growth_interval": 7,
    }
    assert ours._get_growth_tracker() == 0
    assert ours.state_dict() == {}
    assert ours.is_enabled() is False
    ours.set_growth_factor(5.0)
    assert ours.get_growth_factor() == 5.0


def test_a_disabled_scaler_survives_pickling() -> None:
    scaler = pickle.loads(pickle.dumps(GradScaler("cpu", enabled=False, growth_interval=5)))
    assert not scaler.is_enabled()
    assert scaler.get_growth_interval() == 5


def test_without_cuda_the_scaler_warns_and_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.warns(PrecastWarning, match="no CUDA") as warned:
        scaler = GradScaler("cuda")
    assert len(warned) == 1
    assert warned[0].filename == __file__
    assert not scaler.is_enabled()
    GradScaler("cuda", enabled=False)  # silent
    assert GradScaler("cpu").is_enabled()


# --- settings and state ---


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        *[("init_scale", v) for v in (0.0, -1.0, math.inf, math.nan, 1e39, "big", None)],
        *[("growth_factor", v) for v in (1.0, 0.5, math.inf, math.nan, "2")],
        *[("backoff_factor", v) for v in (1.0, 0.0, -0.5, 2.0, math.nan)],
        *[("growth_interval", v) for v in (0, -3, 1.5, "10", None)],
    ],
)
def test_settings_out_of_range_are_refused_by_name(name: str, bad: Any) -> None:
    with pytest.raises(ScalerError, match=f"{name} must be .*got {re.escape(repr(bad))}"):
        GradScaler("cpu", **{name: bad})
    GradScaler("cpu", enabled=False, **{name: bad})  # never used


@pytest.mark.parametrize("bad", ["gpu", "", 65536.0, None])
def test_an_unknown_device_is_refused(bad: Any) -> None:
    with pytest.raises(ScalerError, match="first argument is the device"):
        GradScaler(bad)


def test_setters_take_effect_and_refuse_nonsense() -> None:
    scaler, _, optimizer = started(init_scale=8.0)
    scaler.set_growth_factor(1.0)  # a common way to freeze the scale
    scaler.set_growth_interval(1)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 8.0
    scaler.set_backoff_factor(1.0)
    assert scaler.get_backoff_factor() == 1.0
    for setter in (scaler.set_growth_factor, scaler.set_backoff_factor, scaler.set_growth_interval):
        for bad in (0, -1.0, math.nan, "x"):
            with pytest.raises(ScalerError):
                setter(bad)


@pytest.mark.parametrize(
    "new", [3.0, 3, torch.tensor(3.0), torch.tensor([3]), torch.full((1, 1), 3.0)]
)
def test_a_new_scale_by_number_or_tensor(new: Any) -> None:
    scaler, _, _ = started()
    scaler.update(new)
    assert scaler.get_scale() == 3.0
    if isinstance(new, Tensor):
        assert new.flatten().tolist() == [3.0]


def test_a_new_scale_of_shape_one_which_torch_documents_and_refuses() -> None:
    theirs = torch.amp.GradScaler("cpu")
    theirs.scale(torch.ones(1))
    with pytest.raises(RuntimeError, match="broadcast"):
        theirs.update(torch.tensor([3.0]))


@pytest.mark.parametrize(
    "bad",
    [
        0.0,
        -1.0,
        math.inf,
        math.nan,
        "3",
        torch.ones(2),
        torch.ones((), requires_grad=True),
        torch.ones(1, device="meta"),
    ],
    ids=str,
)
def test_a_bad_new_scale_is_refused_and_nothing_changes(bad: Any) -> None:
    scaler, _, _ = started(init_scale=8.0)
    with pytest.raises(ScalerError, match="new_scale must be"):
        scaler.update(bad)
    assert scaler.get_scale() == 8.0


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize(
    "direction", [(GradScaler, torch.amp.GradScaler), (torch.amp.GradScaler, GradScaler)]
)
def test_states_move_between_our_scaler_and_torchs(direction: Any, lazy: bool) -> None:
    source, target = direction[0]("cpu", 3.0, 4.0, 0.5, 2), direction[1]("cpu", 6.0, 7.0, 0.8, 1)
    parameter = make_parameter()
    source.scale(parameter.sum()).backward()
    source.step(sgd(parameter))
    source.update()
    if not lazy:
        target.scale(torch.ones(1))
    target.load_state_dict(source.state_dict())
    expected = {
        "scale": 3.0,
        "growth_factor": 4.0,
        "backoff_factor": 0.5,
        "growth_interval": 2,
        "_growth_tracker": 1,
    }
    assert source.state_dict() == target.state_dict() == expected
    assert torch.equal(target.scale(torch.ones(1)), torch.full((1,), 3.0))
    assert target.state_dict() == expected


def test_loading_keeps_the_scale_tensor_itself() -> None:
    scaler, _, _ = started()
    tensor = scaler._get_scale_async()
    scaler.load_state_dict({**scaler.state_dict(), "scale": 5.0})
    assert scaler._get_scale_async() is tensor
    assert tensor.item() == 5.0


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_a_copy_goes_on_where_the_scaler_was(duplicate: Any) -> None:
    scaler, parameter, optimizer = started(growth_interval=2, init_scale=8.0)
    scaler.step(optimizer)
    with pytest.raises(ScalerError, match=r"inside an iteration.*after update\(\)"):
        duplicate(scaler)
    scaler.update()
    twin = duplicate(scaler)
    assert twin.state_dict() == scaler.state_dict()
    assert twin.state_dict()["_growth_tracker"] == 1
    twin.scale((parameter * 2).sum()).backward()
    twin.step(optimizer)
    twin.update()
    assert (twin.get_scale(), scaler.get_scale()) == (16.0, 8.0)


# --- a drop-in for torch.amp.GradScaler ---


def test_it_is_recognised_and_inherits_no_public_logic() -> None:
    assert isinstance(GradScaler("cpu"), torch.amp.GradScaler)
    public = [name for name in vars(torch.amp.GradScaler) if not name.startswith("_")]
    for name in public:
        assert getattr(GradScaler, name) is not getattr(torch.amp.GradScaler, name)


@pytest.mark.parametrize("name", [n for n in vars(torch.amp.GradScaler) if not n.startswith("_")])
def test_signatures_are_torchs(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(c, name)) for c in (GradScaler, torch.amp.GradScaler))
    assert [(p.name, p.kind, p.default) for p in ours.parameters.values()] == [
        (p.name, p.kind, p.default) for p in theirs.parameters.values()
    ]


def test_a_subclass_can_override_a_part() -> None:
    class Doubling(GradScaler):
        def unscale_(self, optimizer: Any) -> None:
            super().unscale_(optimizer)
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad.mul_(2)

    parameter = make_parameter()
    before = parameter.detach().clone()
    scaler = Doubling("cpu")
    scaler.scale(parameter.sum()).backward()
    scaler.step(sgd(parameter))
    assert torch.equal(parameter, before - 0.5)
