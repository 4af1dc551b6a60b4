"""Names of PyTorch's scaler that libraries read, call or replace: they exist under `install()`, and tell the truth."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from torch.testing._internal.common_utils import TestCase

import precast
from precast.errors import ScalerError
from precast.grad_scaler.scaler import GradScaler
from tests.support.scaling import bits, make_parameter, sgd, started

KINDS = pytest.mark.parametrize(
    "kind", [torch.amp.GradScaler, GradScaler], ids=["torch", "precast"]
)
FRESH = {"stage": OptState.READY, "found_inf_per_device": {}}
CPU = torch.device("cpu")


def begun(kind: Any) -> tuple[Any, Any, Any]:
    scaler, parameter = kind("cpu", init_scale=8.0), make_parameter()
    scaler.scale(parameter.sum()).backward()
    return scaler, parameter, sgd(parameter)


# --- the states of optimizers ---


@KINDS
def test_the_states_of_optimizers_say_where_they_are(kind: Any) -> None:
    scaler, _, optimizer = begun(kind)
    states = scaler._per_optimizer_states
    assert len(states) == 0
    assert states.get(id(optimizer)) is None
    scaler.unscale_(optimizer)
    states = scaler._per_optimizer_states
    assert list(states) == [id(optimizer)]
    state = states[id(optimizer)]
    assert state["stage"] is OptState.UNSCALED
    assert {d: v.item() for d, v in state["found_inf_per_device"].items()} == {CPU: 0.0}
    scaler.step(optimizer)
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.STEPPED
    assert [dict(each).keys() for each in scaler._per_optimizer_states.values()] == [FRESH.keys()]
    scaler.update()
    assert len(scaler._per_optimizer_states) == 0
    assert scaler._per_optimizer_states["nobody"] == FRESH
    assert not scaler._found_inf_per_device(optimizer)


@KINDS
def test_a_verdict_that_a_program_reduces_in_place_decides(kind: Any) -> None:
    """As programs do over processes: by the states, or by `_found_inf_per_device`."""
    for by_method in (False, True):
        scaler, parameter, optimizer = begun(kind)
        before = bits(parameter)
        scaler.unscale_(optimizer)
        state = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        for found in (scaler._found_inf_per_device(optimizer) if by_method else state).values():
            found.fill_(1.0)
        scaler.step(optimizer)
        scaler.update()
        assert bits(parameter) == before
        assert scaler.get_scale() == 4.0


@KINDS
@pytest.mark.parametrize("way", ["pop", "clear", "assign", "write", "delete"])
def test_an_optimizer_whose_state_is_taken_away_begins_anew(kind: Any, way: str) -> None:
    scaler, parameter, optimizer = begun(kind)
    before = parameter.detach().clone()
    scaler.unscale_(optimizer)
    states = scaler._per_optimizer_states
    if way == "pop":
        assert states.pop(id(optimizer))["stage"] is OptState.UNSCALED
        assert states.pop(id(optimizer), None) is None
    elif way == "clear":
        states.clear()
    elif way == "assign":
        scaler._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
    elif way == "delete":
        del states[id(optimizer)]
    else:
        states[id(optimizer)]["stage"] = OptState.READY
        states[id(optimizer)]["found_inf_per_device"] = {}
    optimizer.zero_grad()
    scaler.scale(parameter.sum()).backward()
    scaler.unscale_(optimizer)  # which is refused twice in an iteration
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(parameter, before - 0.25)


@KINDS
def test_a_step_by_the_parts_of_pytorchs(kind: Any) -> None:
    """As programs that write `step` out themselves."""
    scaler, parameter, optimizer = begun(kind)
    before = parameter.detach().clone()
    scale, tracker = scaler._check_scale_growth_tracker("step")
    assert (scale.item(), tracker.item()) == (8.0, 0)
    state = scaler._per_optimizer_states[id(optimizer)]
    inverse, found = scale.double().reciprocal().float(), torch.zeros(())
    state["found_inf_per_device"] = scaler._unscale_grads_(optimizer, inverse, found, False)
    state["stage"] = OptState.UNSCALED
    scaler._maybe_opt_step(optimizer, state)
    state["stage"] = OptState.STEPPED
    scaler.update()
    assert torch.equal(parameter, before - 0.25)
    assert scaler._growth_tracker.item() == 1


@KINDS
def test_a_scale_may_be_made_before_the_first_loss_and_assigned(kind: Any) -> None:
    scaler = kind("cpu", init_scale=8.0)
    assert scaler._scale is None
    scaler._lazy_init_scale_growth_tracker(CPU)
    assert (scaler._scale.item(), scaler._growth_tracker.item()) == (8.0, 0)
    scaler._scale = torch.tensor(128.0).to(scaler._scale)
    assert scaler.get_scale() == 128.0
    assert scaler.scale(torch.ones(1)).item() == 128.0
    assert (scaler._enabled, scaler._init_scale, scaler._init_growth_tracker) == (True, 8.0, 0)
    assert (scaler._growth_factor, scaler._backoff_factor, scaler._growth_interval) == (
        2,
        0.5,
        2000,
    )


@KINDS
def test_scripts_that_let_float16_through_are_honoured(kind: Any) -> None:
    scaler = kind("cpu", init_scale=8.0)
    original = scaler._unscale_grads_

    def let_through(optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
        return original(optimizer, inv_scale, found_inf, True)

    scaler._unscale_grads_ = let_through
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    scaler.scale(parameter.sum()).backward()
    scaler.step(sgd(parameter))
    assert parameter.tolist() == [0.75, 0.75]


@KINDS
def test_a_step_without_gradients_is_an_assertion_with_pytorchs_words(kind: Any) -> None:
    scaler, parameter = kind("cpu"), make_parameter()
    for call in (lambda: scaler.step(sgd(parameter)), scaler.update):
        with pytest.raises(AssertionError):  # nothing was scaled
            call()
    scaler.scale(torch.ones(1))
    with pytest.raises(AssertionError, match=r"No inf checks were recorded for this optimizer\."):
        scaler.step(sgd(parameter))
    fresh = kind("cpu")
    fresh.scale(torch.ones(1))
    with pytest.raises(AssertionError, match=r"No inf checks were recorded prior to update\."):
        fresh.update()
    assert issubclass(ScalerError, AssertionError)


# --- pickles ---


def test_pytorchs_own_test_of_pickling_passes_under_install() -> None:
    """The scene of `test_pickle_gradscaler`, with PyTorch's own comparison."""
    same = TestCase().assertEqual
    with precast.install():
        for lazy in (True, False):
            first = torch.amp.GradScaler("cpu", 3.0, 4.0, 0.5, 2)
            if not lazy:
                first.scale(torch.tensor([4.0]))
                assert isinstance(first._scale, torch.Tensor)
            second = pickle.loads(pickle.dumps(first))
            same(second.is_enabled(), first.is_enabled())
            same(second.get_scale(), 3.0)
            same(second.get_growth_factor(), 4.0)
            same(second.get_backoff_factor(), 0.5)
            same(second.get_growth_interval(), 2)
            same(second._init_growth_tracker, 0)
            same(second._per_optimizer_states["fdsa"], FRESH)
            same(second.scale(torch.tensor([4.0])), torch.tensor([12.0]))


def train(scaler: Any) -> list[Any]:
    torch.manual_seed(0)
    parameter = make_parameter()
    for turn in range(4):
        parameter.grad = None
        scaler.scale(parameter.sum() * (math.inf if turn == 1 else 1.0)).backward()
        scaler.step(sgd(parameter))
        scaler.update()
    return [bits(parameter), scaler.state_dict()]


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("enabled", [True, False])
def test_a_pickle_of_pytorchs_scaler_loads_and_works_under_install(
    protocol: int, enabled: bool
) -> None:
    theirs = torch.amp.GradScaler("cpu", 8.0, growth_interval=2, enabled=enabled)
    if enabled:
        train(theirs)
    text = pickle.dumps(theirs, protocol)
    with precast.install():
        ours = pickle.loads(text)
        assert type(ours) is GradScaler
        assert ours.is_enabled() is enabled
        if enabled:
            assert ours.state_dict() == theirs.state_dict()
            assert train(ours) == train(theirs)
            assert len(ours.history) == 4
        again = pickle.loads(pickle.dumps(ours, protocol))
        assert again.state_dict() == ours.state_dict()
        for copied in (copy.copy(theirs), copy.deepcopy(theirs)):
            assert isinstance(copied, torch.amp.GradScaler)
            assert copied.state_dict() == theirs.state_dict()
    outside = pickle.loads(text)
    assert type(outside) is type(theirs) is torch.amp.GradScaler
    assert pickle.loads(pickle.dumps(theirs, protocol)).state_dict() == theirs.state_dict()


# --- warnings ---


def warned(call: Any) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    (one,) = [each for each in caught if issubclass(each.category, FutureWarning)]
    return one


OLD = {
    "cuda scaler": lambda: torch.cuda.amp.GradScaler(enabled=False),
    "cpu scaler": lambda: torch.cpu.amp.GradScaler(init_scale=2.0),
    "custom_fwd": lambda: torch.cuda.amp.custom_fwd(print),
    "custom_bwd": lambda: torch.cuda.amp.custom_bwd(print),
}


@pytest.mark.parametrize("name", OLD)
def test_a_deprecated_name_warns_under_install_as_without(name: str) -> None:
    theirs = warned(OLD[name])
    with precast.install():
        ours = warned(OLD[name])
    assert str(ours.message) == str(theirs.message)
    assert (ours.category, ours.filename, ours.lineno) == (
        theirs.category,
        theirs.filename,
        theirs.lineno,
    )


@pytest.mark.parametrize("installed", [True, False])
def test_a_scaler_that_is_off_for_want_of_cuda_says_so_at_the_programs_line(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    makes: list[Any] = [lambda: GradScaler("cuda")]
    if installed:
        makes = [lambda: torch.amp.GradScaler("cuda"), lambda: torch.cuda.amp.GradScaler(2.0)]
    installation = precast.install() if installed else None
    try:
        for make in makes:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                make()
            (off,) = [each for each in caught if "is off" in str(each.message)]
            assert off.filename == __file__
    finally:
        if installation is not None:
            installation.__exit__()


def test_every_warning_of_a_scaler_is_at_the_programs_line() -> None:
    def loads(state: Any) -> None:
        GradScaler("cpu").load_state_dict(state)

    def divides() -> None:
        parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
        scaler = GradScaler("cpu")
        scaler.scale(parameter.sum()).backward()
        scaler.step(sgd(parameter))

    def skips() -> None:
        scaler, parameter, optimizer = started(max_consecutive_skips=1, on_diagnosis="warn")
        parameter.grad.fill_(math.nan)
        scaler.step(optimizer)
        scaler.update()

    state = GradScaler("cpu").state_dict()
    for call in (
        lambda: loads({**state, "scale": 0.0}),
        divides,
        skips,
    ):
        with pytest.warns(precast.errors.PrecastWarning) as caught:
            call()
        assert {each.filename for each in caught} == {__file__}
