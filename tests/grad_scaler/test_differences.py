"""Where PyTorch's scaler fails, refuses or forgets and ours does not: each test shows both.

`DIFFERENT` lists the tests of PyTorch's own that ours is not to pass, with the reason.
"""

from __future__ import annotations

import gc
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precast.grad_scaler.scaler import GradScaler
from tests.support.scaling import make_parameter, sgd, started

DIFFERENT = {
    "test_params_invalidated_with_grads_invalidated_between_unscale_and_step": (
        "demands that gradients broken after unscale_ are written into the parameters; the step is skipped here"
    ),
}
"""PyTorch's test -> why ours does not pass it, in any of its six variants."""

SCALERS: list[type[Any]] = [torch.amp.GradScaler, GradScaler]


# --- PyTorch's own tests ---


@pytest.mark.parametrize(("foreach", "fused"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW])
def test_the_six_variants_that_are_different_are(
    optimizer: Any, foreach: bool, fused: bool
) -> None:
    """As in `test_params_invalidated_with_grads_invalidated_between_unscale_and_step`."""
    intact = []
    for kind in SCALERS:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        made = optimizer(model.parameters(), lr=1.0, foreach=foreach, fused=fused)
        scaler = kind("cpu", init_scale=128.0)
        for x, target in torch.randn(4, 2, 8, 8):
            made.zero_grad()
            scaler.scale(F.mse_loss(model(x), target)).backward()
            scaler.unscale_(made)
            for index, parameter in enumerate(model.parameters()):
                assert parameter.grad is not None
                parameter.grad.mul_(math.inf if index % 2 else math.nan)
            scaler.step(made)
            scaler.update()
        intact.append(all(bool(p.isfinite().all()) for p in model.parameters()))
    assert intact == [False, True]


def test_the_page_lists_what_is_different() -> None:
    page = (Path(__file__).parents[2] / "docs" / "scaler.md").read_text(encoding="utf-8")
    for name in DIFFERENT:
        assert f"`{name}`" in page
    section = page.partition("## PyTorch's own tests")[2].partition("\n## ")[0]
    assert section.count("`test_") == len(DIFFERENT)


# --- losses ---


class Losses(NamedTuple):
    main: Any
    extra: Any = None


def test_where_torch_breaks_containers_of_losses() -> None:
    one = torch.ones(2)
    theirs = torch.amp.GradScaler("cpu")
    broken = theirs.scale(Losses(one))
    assert isinstance(broken.main, map)  # the whole iterator landed in the first field
    [letters] = theirs.scale({"loss": one})  # walks over the keys; the loss is gone
    assert isinstance(letters, map)

    ours = GradScaler("cpu")
    assert torch.equal(ours.scale(Losses(one)).main, one * 2.0**16)
    assert torch.equal(ours.scale({"loss": one})["loss"], one * 2.0**16)


# --- steps ---


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


def test_no_closure_by_name_is_not_a_closure() -> None:
    theirs, _, optimizer = started(torch.amp.GradScaler)
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        theirs.step(optimizer, closure=None)

    ours, parameter, optimizer = started()
    before = parameter.detach().clone()
    ours.step(optimizer, closure=None)
    assert not torch.equal(parameter, before)


class Fails(torch.optim.Optimizer):
    """An optimizer with a scaling of its own, whose step fails."""

    _step_supports_amp_scaling = True

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        raise KeyError


def test_attributes_are_taken_back_when_the_step_fails() -> None:
    left = []
    for kind in SCALERS:
        scaler, parameter, _ = started(kind)
        optimizer = Fails([parameter])
        with pytest.raises(KeyError):
            scaler.step(optimizer)
        left.append((hasattr(optimizer, "grad_scale"), hasattr(optimizer, "found_inf")))
    assert left == [(True, True), (False, False)]


# --- being off, settings ---


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


@pytest.mark.parametrize(
    "new", [3, torch.tensor([3]), torch.tensor([3.0]), torch.full((1, 1), 3.0)], ids=str
)
def test_a_new_scale_which_torch_documents_and_refuses(new: Any) -> None:
    """A whole number, and a tensor of one element with dimensions."""
    theirs, _, _ = started(torch.amp.GradScaler)
    with pytest.raises((AttributeError, RuntimeError), match=r"broadcast|no attribute 'device'"):
        theirs.update(new)

    ours, _, _ = started()
    ours.update(new)
    assert ours.get_scale() == 3.0
    if isinstance(new, Tensor):
        assert new.flatten().tolist() == [3.0]
