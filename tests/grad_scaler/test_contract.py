"""The scaler as a drop-in: its names and signatures are PyTorch's, and it says by name what it does not take.

What it decides and computes is the table of `test_decisions.py`.
"""

from __future__ import annotations

import collections
import inspect
import math
import pickle
import re
from typing import Any, NamedTuple

import pytest
import torch

from precast.errors import PrecastWarning, ScalerError
from precast.grad_scaler.scaler import GradScaler
from tests.grad_scaler.test_decisions import Both
from tests.support.scaling import make_parameter, sgd, started

# --- what is scaled ---


class Losses(NamedTuple):
    main: Any
    extra: Any = None


def test_losses_in_any_container() -> None:
    scaler = GradScaler("cpu", init_scale=4.0)
    one = torch.ones(2)
    outputs = {
        "a": [one, (one, {"n": 3})],
        "b": Losses(one, one.int()),
        "c": collections.deque([one]),
    }
    scaled = scaler.scale(outputs)
    four = torch.full((2,), 4.0)
    assert torch.equal(scaled["a"][0], four)
    assert torch.equal(scaled["a"][1][0], four)
    assert scaled["a"][1][1] == {"n": 3}
    assert torch.equal(scaled["b"].main, four)
    assert scaled["b"].extra is outputs["b"].extra
    assert torch.equal(scaled["c"][0], four)
    assert torch.equal(one, torch.ones(2))


@pytest.mark.parametrize("wrong", [3.0, None, "loss", [1.0, None], {"loss": 2.0}])
def test_a_loss_that_is_no_tensor_is_refused(wrong: Any) -> None:
    with pytest.raises(ScalerError, match=f"no tensor in a {type(wrong).__name__}.*loss.item"):
        GradScaler("cpu").scale(wrong)


@pytest.mark.parametrize("empty", [[], (), {}])
def test_no_losses_are_scaled_to_no_losses(empty: Any) -> None:
    assert GradScaler("cpu").scale(empty) is empty


# --- what it says of an optimizer ---


def test_a_scaler_says_whether_gradients_are_unscaled() -> None:
    scaler, _, optimizer = started()
    other = sgd(make_parameter())
    assert not scaler.is_unscaled(optimizer)
    scaler.unscale_(optimizer)
    assert scaler.is_unscaled(optimizer)
    assert not scaler.is_unscaled(other)
    scaler.step(optimizer)
    scaler.update()
    assert not scaler.is_unscaled(optimizer), "the next iteration's are not yet"
    assert GradScaler("cpu", enabled=False).is_unscaled(optimizer), "never scaled"


def test_the_last_step_is_that_of_the_very_optimizer() -> None:
    """Of one that is equal to it, but another, nothing is said; it need not be hashable, as a dataclass is not."""
    parameter = make_parameter()
    both: Any = Both([sgd(parameter)])
    scaler = GradScaler("cpu")
    scaler.scale(parameter.sum()).backward()
    scaler.step(both)
    scaler.update()
    event = scaler.last_step(both)
    assert event is not None
    assert not event.skipped
    assert scaler.last_step(Both(both.parts)) is None  # type: ignore[arg-type]


# --- a scaler that is off ---


def test_a_disabled_scaler_survives_pickling() -> None:
    scaler = pickle.loads(pickle.dumps(GradScaler("cpu", enabled=False, growth_interval=5)))
    assert not scaler.is_enabled()
    assert scaler.get_growth_interval() == 5


def test_without_cuda_the_scaler_warns_and_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.warns(PrecastWarning, match="CUDA is not available") as warned:
        scaler = GradScaler("cuda")
    assert len(warned) == 1
    assert warned[0].filename == __file__
    assert not scaler.is_enabled()
    GradScaler("cuda", enabled=False)  # silent
    assert GradScaler("cpu").is_enabled()


# --- settings ---


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
    with pytest.raises(ScalerError, match="unknown device"):
        GradScaler(bad)


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


# --- a drop-in for torch.amp.GradScaler ---


def test_it_is_recognised_and_inherits_only_queries_of_settings() -> None:
    assert isinstance(GradScaler("cpu"), torch.amp.GradScaler)
    public = {name for name in vars(torch.amp.GradScaler) if not name.startswith("_")}
    queries = {"get_growth_factor", "get_backoff_factor", "get_growth_interval", "is_enabled"}
    for name in public - queries:
        assert getattr(GradScaler, name) is not getattr(torch.amp.GradScaler, name)


@pytest.mark.parametrize("name", [n for n in vars(torch.amp.GradScaler) if not n.startswith("_")])
def test_signatures_are_torchs(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(c, name)) for c in (GradScaler, torch.amp.GradScaler))
    assert [(p.name, p.kind, p.default) for p in ours.parameters.values()] == [
        (p.name, p.kind, p.default) for p in theirs.parameters.values()
    ]
