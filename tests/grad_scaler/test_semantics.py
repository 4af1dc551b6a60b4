"""What PyTorch's own tests ask of its gradient scaler, asked of ours: scenes from its test files.

Each scene is run with both scalers. `DIFFERENT` lists the tests that ours is not to pass, with the reason.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import precast

DIFFERENT = {
    "test_params_invalidated_with_grads_invalidated_between_unscale_and_step": (
        "demands that gradients broken after unscale_ are written into the parameters; the step is skipped here"
    ),
}
"""PyTorch's test -> why ours does not pass it, in any of its six variants."""

SCALERS = [torch.amp.GradScaler, precast.GradScaler]
SKIPPED_STEP, STEPS = 2, 4
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=1.0),
    "Adam": lambda ps: torch.optim.Adam(ps, lr=1.0),
    "foreach AdamW": lambda ps: torch.optim.AdamW(ps, lr=1.0, foreach=True),
    "fused Adam": lambda ps: torch.optim.Adam(ps, lr=1.0, fused=True),
}
both = pytest.mark.parametrize("kind", SCALERS, ids=["torch", "precast"])


def _network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def _data() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    for _ in range(STEPS):
        yield torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)


def _spoil(model: nn.Module, number: int) -> None:
    if number == SKIPPED_STEP:
        model.get_parameter("1.weight").grad.fill_(math.inf)  # type: ignore[union-attr]


def _plain(model: nn.Module, optimizer: Any, scaler: Any, treat: Callable[[Any], None]) -> None:
    """Without scaling where `scaler` is None; the step that is to be skipped is left out."""
    for number, (x, target) in enumerate(_data()):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), target)
        if scaler is None:
            loss.backward()
            if number != SKIPPED_STEP:
                treat(model)
                optimizer.step()
            continue
        scaler.scale(loss).backward()
        _spoil(model, number)
        scaler.unscale_(optimizer)
        treat(model)
        scaler.step(optimizer)
        scaler.update()


TREATMENTS: dict[str, Callable[[Any], None]] = {
    "nothing": lambda model: None,
    "clipping": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.2),  # type: ignore[func-returns-value]
    "clipping by value": lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01),
}


@both
@pytest.mark.parametrize("treatment", TREATMENTS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_scaled_run_is_the_plain_one_without_its_bad_step(
    kind: Any, optimizer: str, treatment: str
) -> None:
    """As in `test_grad_scaling_autocast`, `_clipping`, `_clipping_separate_unscale`."""
    scaler = kind("cpu", init_scale=128.0, growth_factor=2.0, growth_interval=1)
    models = [_network(), _network()]
    for model, each in zip(models, (None, scaler), strict=True):
        made = OPTIMIZERS[optimizer](model.parameters())
        _plain(model, made, each, TREATMENTS[treatment])
    assert scaler.get_scale() == 128.0 * 2.0**3 * 0.5
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


@both
def test_accumulation(kind: Any) -> None:
    """As in `test_grad_scaling_accumulation`: two micro-batches a step."""
    model = _network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = kind("cpu", init_scale=128.0, growth_interval=1)
    for number, (x, target) in enumerate(_data()):
        scaler.scale(F.mse_loss(model(x), target) / 2).backward()
        if number % 2:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert scaler.get_scale() == 128.0 * 4


@both
def test_a_penalty_on_gradients(kind: Any) -> None:
    """As in `test_grad_scaling_penalty`."""
    found = []
    for scaler in (None, kind("cpu", init_scale=128.0)):
        model = _network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, target in _data():
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), target)
            parameters = list(model.parameters())
            scaled = loss if scaler is None else scaler.scale(loss)
            gradients = torch.autograd.grad(scaled, parameters, create_graph=True)
            inverse = 1.0 if scaler is None else 1.0 / scaler.get_scale()
            penalty = torch.stack([(g * inverse).square().sum() for g in gradients]).sum().sqrt()
            total = loss + penalty
            (total if scaler is None else scaler.scale(total)).backward()
            optimizer.step() if scaler is None else scaler.step(optimizer)
            if scaler is not None:
                scaler.update()
        found.append(model)
    for ours, theirs in zip(found[0].parameters(), found[1].parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


@both
def test_one_of_two_optimizers_is_skipped_alone(kind: Any) -> None:
    """As in `test_grad_scaling_multiple`."""
    models = [_network(), _network()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    scaler = kind("cpu", init_scale=128.0, growth_interval=1)
    for number, (x, target) in enumerate(_data()):
        before = copy.deepcopy(models[1].state_dict())
        for optimizer in optimizers:
            optimizer.zero_grad()
        outputs = [model(x) for model in models]
        losses = [F.mse_loss(outputs[0] + 0.5 * outputs[1], target), F.mse_loss(outputs[1], target)]
        scaler.scale(losses[0]).backward(retain_graph=True)
        scaler.scale(losses[1]).backward()
        _spoil(models[1], number)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        same = all(torch.equal(before[k], v) for k, v in models[1].state_dict().items())
        assert same == (number == SKIPPED_STEP)
    assert scaler.get_scale() == 128.0 * 2**3 * 0.5


@both
def test_a_pickled_scaler_goes_on(kind: Any) -> None:
    """As in `test_grad_scaling_autocast` with `try_pickle`."""
    model = _network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = kind("cpu", init_scale=128.0, growth_interval=2)
    for x, target in _data():
        optimizer.zero_grad()
        scaler.scale(F.mse_loss(model(x), target)).backward()
        scaler.step(optimizer)
        scaler.update()
        scaler = pickle.loads(pickle.dumps(scaler))
    assert scaler.get_scale() == 128.0 * 4


@both
def test_the_scale_never_overflows(kind: Any) -> None:
    """As in `test_grad_scale_will_not_overflow`."""
    model = nn.Linear(5, 1)
    optimizer = torch.optim.Adam(model.parameters())
    scaler = kind("cpu", growth_interval=1, growth_factor=2.0**4, init_scale=1e38)
    loss = ((model(torch.randn(1, 5)) - 1e-30) ** 2).mean() * 1e-30
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert math.isfinite(scaler.get_scale())


@both
def test_nothing_to_check_is_an_error(kind: Any) -> None:
    """As in `test_grad_scaler_pass_itself` and its neighbours: a step without gradients."""
    scaler = kind("cpu")
    scaler.scale(torch.ones(()))
    parameter = nn.Parameter(torch.ones(1))
    with pytest.raises((AssertionError, RuntimeError), match=r"No inf checks|no gradients were"):
        scaler.step(torch.optim.SGD([parameter], lr=0.1))


@pytest.mark.parametrize(("foreach", "fused"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW])
def test_the_six_variants_that_are_different_are(
    optimizer: Any, foreach: bool, fused: bool
) -> None:
    """As in `test_params_invalidated_with_grads_invalidated_between_unscale_and_step`."""
    intact = []
    for kind in SCALERS:
        model = _network()
        made = optimizer(model.parameters(), lr=1.0, foreach=foreach, fused=fused)
        scaler = kind("cpu", init_scale=128.0)
        for x, target in _data():
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


@both
@pytest.mark.parametrize("bad", [-1, 0, 1, 2, 3])
def test_gradients_of_several_dtypes_and_layouts_are_unscaled_together(kind: Any, bad: int) -> None:
    """As in `test_grad_scaling_unscale`: the verdict may have one dimension, and float16 is let through."""
    full = torch.full((20, 20), 4.0)
    gradients = [full.clone(), full.clone()[:, :5], full.half(), full.half()]
    if bad >= 0:
        gradients[bad][2, 2] = math.inf
    parameters = [torch.empty_like(gradient) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    found = kind("cpu")._unscale_grads_(optimizer, torch.full((1,), 0.25), torch.zeros(1), True)
    assert sum(verdict.item() for verdict in found.values()) == (bad >= 0)
    if bad < 0:
        assert all(torch.equal(gradient, torch.ones_like(gradient)) for gradient in gradients)


def test_the_page_lists_what_is_different() -> None:
    page = (Path(__file__).parents[2] / "docs" / "scaler.md").read_text(encoding="utf-8")
    for name in DIFFERENT:
        assert f"`{name}`" in page
    section = page.partition("## PyTorch's own tests")[2].partition("\n## ")[0]
    assert section.count("`test_") == len(DIFFERENT)
