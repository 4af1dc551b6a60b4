"""Where the scale stays, and what happens where no lower scale helps."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from precast.errors import BrokenModelError, PrecastWarning, ScalerError
from precast.grad_scaler.scaler import GradScaler
from tests.support.scaling import KINDS, bits, make_parameter, sgd

Tensor = torch.Tensor


def iterate(scaler: Any, parameter: Tensor, optimizer: Any, gradient: float, loss: float) -> None:
    optimizer.zero_grad()
    scaler.scale(torch.full((), loss))
    parameter.grad = torch.full_like(parameter, gradient)
    scaler.step(optimizer)
    scaler.update()


def test_where_torch_writes_nan_into_the_parameters() -> None:
    """400 iterations of NaN, then a good one: PyTorch's scale is 0, its inverse infinite."""
    theirs, ours = make_parameter(), make_parameter()
    scaler = torch.amp.GradScaler("cpu")
    for turn in range(401):
        iterate(scaler, theirs, sgd(theirs), 1.0 if turn == 400 else math.nan, 1.0)
    assert scaler.get_scale() == 0.0
    assert not theirs.isfinite().any()

    before = bits(ours)
    careful = GradScaler("cpu", on_diagnosis="ignore")
    for _ in range(400):
        iterate(careful, ours, sgd(ours), math.nan, 1.0)
    assert bits(ours) == before
    assert careful.get_scale() == 2.0**-48
    iterate(careful, ours, sgd(ours), 1.0, 1.0)
    assert ours.isfinite().all()


@pytest.mark.parametrize("kind", ["sgd", "foreach adam", "fused adam"])
@pytest.mark.parametrize(
    ("reason", "expected", "loss"), [("floor", 42, 1.0), ("skips", 7, 1.0), ("loss", 2, math.nan)]
)
def test_a_verdict_with_its_reason(kind: str, reason: str, expected: int, loss: float) -> None:
    parameter = make_parameter()
    before = bits(parameter)
    optimizer = KINDS[kind]([parameter])
    limits: dict[str, Any] = {
        "floor": {"min_scale": 2.0**14},
        "skips": {"max_consecutive_skips": 7},
        "loss": {"max_nonfinite_losses": 1},
    }
    scaler = GradScaler("cpu", **limits[reason])
    for _ in range(expected - 1):
        iterate(scaler, parameter, optimizer, math.inf, loss)
    scale = scaler.get_scale()
    with pytest.raises(BrokenModelError) as caught:
        iterate(scaler, parameter, optimizer, math.inf, loss)
    assert scaler.get_scale() == scale, "not another halving"
    diagnosis = caught.value.diagnosis
    assert (diagnosis.reason, diagnosis.names) == (reason, ("group 0, parameter 0",))
    for part in (f"iteration {expected - 1} was", f"at scale {scale:g}", "parameter 0", "Look at"):
        assert part in str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).diagnosis == diagnosis
    assert bits(parameter) == before
    iterate(scaler, parameter, optimizer, 1.0, 1.0)  # whoever goes on, goes on
    assert bits(parameter) != before


def test_a_verdict_tells_parameters_apart_whose_names_have_commas() -> None:
    parameters = [make_parameter() for _ in range(2)]
    optimizer = torch.optim.SGD(parameters)
    scaler = GradScaler("cpu", max_nonfinite_losses=0)
    scaler.scale(torch.full((), math.nan))
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, math.nan)
    scaler.step(optimizer)
    with pytest.raises(BrokenModelError, match="`group 0, parameter 0`, `group 0, parameter 1`"):
        scaler.update()


def test_one_bad_batch_is_no_verdict_unless_it_is_asked_to_be() -> None:
    parameter = make_parameter()
    scaler = GradScaler("cpu")
    for turn in range(6):
        good = turn % 2 == 0
        iterate(
            scaler, parameter, sgd(parameter), 1.0 if good else math.nan, 1.0 if good else math.nan
        )
    strict = GradScaler("cpu", max_nonfinite_losses=0)
    with pytest.raises(BrokenModelError, match="loss itself was infinite or NaN"):
        iterate(strict, parameter, sgd(parameter), math.nan, math.nan)


@pytest.mark.parametrize("action", ["warn", "ignore"])
def test_what_a_verdict_does_is_the_users_choice(action: Any) -> None:
    parameter = make_parameter()
    scaler = GradScaler("cpu", 1.0, min_scale=1.0, max_consecutive_skips=1, on_diagnosis=action)
    if action == "warn":
        with pytest.warns(PrecastWarning, match="the limit that max_consecutive_skips sets"):
            iterate(scaler, parameter, sgd(parameter), math.nan, 1.0)
    else:
        iterate(scaler, parameter, sgd(parameter), math.nan, 1.0)
    assert scaler.get_scale() == 1.0
    assert scaler.counters.consecutive_skips == 1


LARGEST = torch.finfo(torch.float32).max
cases = st.fixed_dictionaries(
    {
        "first": st.sampled_from([2.0**-14, 1.0, 3.0, 2.0**16]),
        "limits": st.sampled_from(
            [(None, None), (2.0**-126, 3e38), (2.0**-14, 1e5), (None, 2.0**20)]
        ),
        "factors": st.sampled_from([(2.0, 0.5), (1e30, 1e-30), (1.5, 0.1)]),
        "set later": st.sampled_from([None, (0.5, 1e30), (1e-30, 3.0), (1e38, 1e38)]),
        "turns": st.lists(st.sampled_from([1.0, 1.0, math.inf, math.nan]), max_size=30),
        "kind": st.sampled_from(["sgd", "fused adam"]),
        "new scale": st.sampled_from([None, 0.0, math.nan, math.inf, -1.0, 7.0]),
    }
)


@settings(max_examples=150)
@given(case=cases)
def test_the_scale_never_leaves_its_limits(case: dict[str, Any]) -> None:
    low, high = case["limits"]
    scaler = GradScaler(
        "cpu",
        case["first"],
        *case["factors"],
        2,
        min_scale=low,
        max_scale=high,
        on_diagnosis="ignore",
    )
    if case["set later"]:
        scaler.set_growth_factor(case["set later"][0])
        scaler.set_backoff_factor(case["set later"][1])
    parameter = make_parameter()
    optimizer = KINDS[case["kind"]]([parameter])
    low, high = (float(torch.tensor(limit)) for limit in (low or 2.0**-48, high or LARGEST))
    for gradient in case["turns"]:
        scaled = gradient * min(
            scaler.get_scale(), 1.0
        )  # at most 1 unscaled: steps must not overflow
        iterate(scaler, parameter, optimizer, scaled, 1.0)
        assert low <= scaler.get_scale() <= high
        assert parameter.isfinite().all()
    if case["new scale"] is not None:
        scaler.scale(torch.ones(()))
        scaler.update(torch.tensor(case["new scale"]))
        assert low <= scaler.get_scale() <= high


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"min_scale": 0.0}, "min_scale must be"),
        ({"min_scale": 2.0**-140}, "min_scale must be"),
        ({"min_scale": "low"}, "min_scale must be"),
        ({"max_scale": math.inf}, "max_scale must be"),
        ({"max_scale": 1.0}, "init_scale must be between min_scale and max_scale"),
        ({"min_scale": 2.0**20}, "init_scale must be between"),
        ({"init_scale": 2.0**-140}, "init_scale must be"),
        ({"max_consecutive_skips": 0}, "max_consecutive_skips must be a whole number, 1"),
        ({"max_nonfinite_losses": -1}, "max_nonfinite_losses must be a whole number, 0"),
        ({"on_diagnosis": "shout"}, "'raise', 'warn' or 'ignore'; got 'shout'"),
        ({"history": -1}, "history must be a whole number, 0"),
    ],
)
def test_limits_out_of_range_are_refused_by_name(arguments: Any, message: str) -> None:
    with pytest.raises(ScalerError, match=message):
        GradScaler("cpu", **arguments)


def test_a_new_scale_outside_the_limits_is_refused() -> None:
    scaler = GradScaler("cpu", max_scale=2.0**20)
    scaler.scale(torch.ones(()))
    with pytest.raises(ScalerError, match="between min_scale and max_scale"):
        scaler.update(2.0**21)
    assert scaler.get_scale() == 2.0**16


# --- nothing but unscaled, finite gradients reaches a parameter ---


def test_what_clipping_by_value_hides_is_remembered() -> None:
    parameter = make_parameter()
    before = bits(parameter)
    scaler = GradScaler("cpu")
    scaler.scale((parameter * math.inf).sum()).backward()
    optimizer = sgd(parameter)
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_value_(parameter, 1.0)
    assert parameter.grad.isfinite().all()  # type: ignore[union-attr]
    scaler.step(optimizer)
    assert bits(parameter) == before


@pytest.mark.parametrize("set_to_none", [True, False])
def test_scaled_gradients_after_an_interrupted_iteration_are_refused(set_to_none: bool) -> None:
    """Ctrl-C between unscale_ and step, and the loop goes on: PyTorch then steps on scaled gradients."""
    found = []
    for scaler in (torch.amp.GradScaler("cpu"), GradScaler("cpu")):
        parameter = torch.nn.Parameter(torch.ones(1))
        optimizer = sgd(parameter)
        scaler.scale(parameter.sum()).backward()
        scaler.unscale_(optimizer)  # and here the iteration is broken off
        optimizer.zero_grad(set_to_none=set_to_none)
        scaler.scale(parameter.sum()).backward()
        if isinstance(scaler, GradScaler):
            with pytest.raises(ScalerError, match=r"backward\(\) added.*zero_grad"):
                scaler.step(optimizer)
            optimizer.zero_grad()
            scaler.update()
        else:
            scaler.step(optimizer)
        found.append(parameter.item())
    assert found == [1 - 0.25 * 2.0**16, 1.0]
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    assert parameter.item() == 0.75


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["autograd.backward", "scaled list", "kept graph", "clipped"])
def test_backward_after_unscaling_is_refused_however_it_comes(kind: str, way: str) -> None:
    """Its loss may have been scaled before `unscale_`, so that no call of the scaler comes between."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = KINDS[kind]([parameter])
    scaler = GradScaler("cpu", init_scale=256.0)
    losses = scaler.scale([parameter.sum(), (parameter * 3).sum()])
    losses[0].backward(retain_graph=True)
    if way == "clipped":
        scaler.clip_grad_norm_(optimizer, 1e9)
    else:
        scaler.unscale_(optimizer)
    before = bits(parameter)
    again = losses[0] if way == "kept graph" else losses[1]
    torch.autograd.backward([again]) if way == "autograd.backward" else again.backward()
    with pytest.raises(ScalerError, match=r"backward\(\) added"):
        scaler.step(optimizer)
    assert bits(parameter) == before
    optimizer.zero_grad()
    scaler.update()
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert bits(parameter) != before
    assert not parameter._post_accumulate_grad_hooks


def test_another_loss_between_unscaling_and_step_is_fine() -> None:
    first, second = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    optimizers = [sgd(first), sgd(second)]
    scaler = GradScaler("cpu")
    scaler.scale(first.sum()).backward()
    scaler.unscale_(optimizers[0])
    scaler.scale(second.sum()).backward()
    torch.nn.utils.clip_grad_norm_(first, 0.5)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert [first.item(), second.item()] == pytest.approx([0.875, 0.75])
    assert not first._post_accumulate_grad_hooks
