"""States: what is saved is loaded, whoever saved it, and what is wrong changes nothing."""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from precast.errors import BrokenModelError, PrecastWarning, ScalerError
from precast.grad_scaler.losses import LossScalers
from precast.grad_scaler.scaler import GradScaler
from tests.support.scaling import make_parameter, sgd, started

FIVE = {
    "scale": 3.0,
    "growth_factor": 4.0,
    "backoff_factor": 0.25,
    "growth_interval": 7,
    "_growth_tracker": 5,
}

setups = st.fixed_dictionaries(
    {
        "init_scale": st.sampled_from([1.0, 3.0, 2.0**16, "auto"]),
        "growth_factor": st.floats(1.001, 1e6),
        "backoff_factor": st.floats(1e-6, 0.999),
        "growth_interval": st.integers(1, 10**6),
    }
)


@settings(max_examples=150)
@given(setup=setups, begun=st.booleans())
def test_every_setting_of_pytorchs_comes_back(setup: dict[str, Any], begun: bool) -> None:
    scaler, fresh = GradScaler("cpu", **setup), GradScaler("cpu")
    if begun:
        fresh.scale(torch.ones(()))
    fresh.load_state_dict(scaler.state_dict())
    assert fresh.state_dict() == scaler.state_dict()
    assert (
        fresh._search.is_searching == scaler._search.is_searching == (setup["init_scale"] == "auto")
    )
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(scaler.state_dict())
    assert theirs.get_scale() == scaler.get_scale()
    assert theirs.get_growth_interval() == setup["growth_interval"]


def test_a_state_is_pytorchs_where_all_else_is_the_default() -> None:
    assert GradScaler("cpu").state_dict() == torch.amp.GradScaler("cpu").state_dict()


@pytest.mark.parametrize("loaded", [True, False])
def test_an_interval_below_the_good_iterations_so_far_grows_with_the_next(loaded: bool) -> None:
    """PyTorch's scaler grows no more until a step is skipped: it compares by ``==``."""
    scales = []
    for kind in (GradScaler, torch.amp.GradScaler):
        scaler: Any = kind("cpu", init_scale=4.0, growth_interval=10)
        for turn in range(6):
            if turn == 4 and loaded:
                scaler.load_state_dict({**scaler.state_dict(), "growth_interval": 2})
            elif turn == 4:
                scaler.set_growth_interval(2)
            good_iteration(scaler)
        scales.append(scaler.get_scale())
        if kind is GradScaler:
            assert scaler.counters.growths == 1
    assert scales == [8.0, 4.0]


def good_iteration(scaler: Any) -> None:
    parameter = make_parameter()
    optimizer = sgd(parameter)
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    scaler.update()


def test_a_state_that_is_loaded_begins_anew_after_a_verdict() -> None:
    scaler, parameter = GradScaler("cpu", max_nonfinite_losses=1), make_parameter()
    state, optimizer = scaler.state_dict(), sgd(parameter)

    def bad_batch() -> None:
        optimizer.zero_grad()
        scaler.scale(parameter.sum() * math.nan).backward()
        scaler.step(optimizer)
        scaler.update()

    for _ in range(2):
        bad_batch()
        with pytest.raises(BrokenModelError):
            bad_batch()
        scaler.load_state_dict(state)
        assert scaler.counters.consecutive_skips == 0
    assert scaler.counters.skipped == 4


def test_a_search_that_is_loaded_leaves_no_room_for_the_overflows_before() -> None:
    scaler, parameter = GradScaler("cpu", "auto", growth_interval=1), make_parameter()
    state, optimizer = scaler.state_dict(), sgd(parameter)
    for turn in range(40):
        optimizer.zero_grad()
        scaler.scale(parameter.sum() * (1e36 if turn % 2 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    scaler.load_state_dict(state)
    good_iteration(scaler)
    assert scaler.get_scale() == 2.0**14


def test_a_state_leaves_the_limits_alone() -> None:
    scaler = GradScaler("cpu", init_scale="auto", max_scale=2.0**20, on_diagnosis="warn")
    scaler.load_state_dict(dict(FIVE))
    assert (scaler._limits.max_scale, scaler._limits.on_diagnosis) == (2.0**20, "warn")
    assert not scaler._search.is_searching
    assert scaler.state_dict() == FIVE


def test_the_empty_state_of_a_scaler_that_was_off_changes_nothing() -> None:
    empty = torch.amp.GradScaler("cpu", enabled=False).state_dict()
    assert empty == {}
    with pytest.raises(RuntimeError, match="empty"):
        torch.amp.GradScaler("cpu").load_state_dict(empty)
    scaler, _, optimizer = started(init_scale=8.0)
    scaler.load_state_dict(empty)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 8.0


def test_the_state_of_a_sharded_scaler_loads() -> None:
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    state = ShardedGradScaler("cpu", init_scale=64.0, growth_interval=3).state_dict()
    scaler = GradScaler("cpu")
    scaler.load_state_dict(state)
    assert scaler.state_dict() == state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": None}, "without scale; it has growth_factor"),
        ({"scale": "much"}, "scale='much'"),
        ({"scale": math.nan}, "scale=nan"),
        ({"scale": -1.0}, "scale=-1.0"),
        ({"growth_factor": 0}, "growth_factor must be"),
        ({"backoff_factor": math.nan}, "backoff_factor must be"),
        ({"growth_interval": 0}, "growth_interval must be"),
        ({"_growth_tracker": -1}, "_growth_tracker must be"),
    ],
)
def test_a_wrong_state_is_refused_whole(change: dict[str, Any], message: str) -> None:
    state = {k: v for k, v in {**FIVE, **change}.items() if v is not None}
    scaler, _, _ = started()
    before = copy.deepcopy(scaler.state_dict())
    with pytest.raises(ScalerError, match=message):
        scaler.load_state_dict(state)
    assert scaler.state_dict() == before


@pytest.mark.parametrize(
    ("saved", "taken", "says"),
    [
        (0.0, 2.0**-14, "below min_scale.*may hold NaN"),
        (4.5e-44, 2.0**-14, "below min_scale.*may hold NaN"),
        (2.0**21, 2.0**20, r"above max_scale: 1.04858e\+06 is used\.$"),
        (math.inf, 2.0**20, r"above max_scale: 1.04858e\+06 is used\.$"),
    ],
)
def test_a_scale_outside_the_limits_is_moved_to_the_nearest(
    saved: float, taken: float, says: str
) -> None:
    scaler = GradScaler("cpu", max_scale=2.0**20)
    with pytest.warns(PrecastWarning, match=says):
        scaler.load_state_dict({**FIVE, "scale": saved})
    assert scaler.get_scale() == taken


# --- junk ---

junk = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([2**31, 2**63, 2**70, -(2**70), 10**400]),
    st.floats(),
    st.complex_numbers(),
    st.fractions(),
    st.decimals(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.builds(object),
    st.sampled_from(
        [torch.tensor(3.0), torch.tensor(2), torch.ones(2), torch.ones((), device="meta")]
    ),
)
odd = st.recursive(
    junk, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner)
)
states = st.one_of(
    odd,
    st.builds(
        lambda change: {**FIVE, **change}, st.dictionaries(st.sampled_from(sorted(FIVE)), odd)
    ),
    st.builds(
        lambda extra: {**FIVE, "searching": extra},
        odd,
    ),
)


@settings(max_examples=400)
@given(state=states)
@pytest.mark.filterwarnings("ignore::precast.errors.PrecastWarning")
def test_a_state_of_anything_loads_and_works_or_is_one_error_that_changes_nothing(
    state: Any,
) -> None:
    scaler, parameter, optimizer = started()
    before, counters = scaler.state_dict(), scaler.counters
    try:
        scaler.load_state_dict(state)
    except ScalerError:
        assert scaler.state_dict() == before
        assert scaler.counters == counters
    assert parameter.grad is not None
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() > 0
    scalers = LossScalers("cpu", ["a", "b"], init_scale="auto")
    known = scalers.state_dict()
    with contextlib.suppress(ScalerError):
        scalers.load_state_dict({"a": {**FIVE}, "b": state})
        known = scalers.state_dict()
    assert scalers.state_dict() == known, "not one of two"
    with contextlib.suppress(ScalerError):
        scalers.load_state_dict(state)


SETTINGS = set(inspect.signature(GradScaler).parameters) - {"enabled", "reduce_found_inf"}


@settings(max_examples=400)
@given(name=st.sampled_from(sorted(SETTINGS)), value=odd)
@pytest.mark.filterwarnings("ignore::precast.errors.PrecastWarning")
def test_a_setting_of_anything_works_or_is_one_error(name: str, value: Any) -> None:
    try:
        scaler = GradScaler(**{"device": "cpu", name: value})
    except ScalerError:
        return
    if name == "device":
        return
    parameter = make_parameter()
    optimizer = sgd(parameter)
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    scaler.update()


@settings(max_examples=200)
@given(name=st.sampled_from(["growth_factor", "backoff_factor", "growth_interval"]), value=odd)
def test_a_setter_takes_anything_or_refuses_it_before_it_changes(name: str, value: Any) -> None:
    scaler, _, optimizer = started()
    before = scaler.state_dict()
    try:
        getattr(scaler, f"set_{name}")(value)
    except ScalerError:
        assert scaler.state_dict() == before
    with contextlib.suppress(ScalerError):
        scaler.step(optimizer)
        scaler.update(value)
    assert scaler.get_scale() > 0


@pytest.mark.parametrize("interval", [2**31, 2**40, 2**63 - 1])
def test_an_interval_that_is_never_over_is_one(interval: int) -> None:
    scaler, _, optimizer = started(growth_interval=3)
    scaler.set_growth_interval(interval)
    scaler.load_state_dict(GradScaler("cpu", growth_interval=interval).state_dict())
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_growth_interval() == interval
    with pytest.raises(ScalerError, match=r"growth_interval must be .* at most 2\*\*63 - 1; got"):
        scaler.set_growth_interval(2**63)
