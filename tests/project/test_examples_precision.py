"""Chapters 7 and 8 of `examples/` are right: formats, stable functions, autograd functions, scalers."""

from __future__ import annotations

import importlib
import random

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

LIMITS = importlib.import_module("07_limits")
SOFTMAX = importlib.import_module("07_softmax")
CUSTOM = importlib.import_module("08_custom_function")
SCALER = importlib.import_module("08_scaler")
RECIPES = importlib.import_module("08_recipes")

FORMATS = pytest.mark.parametrize("dtype", LIMITS.FORMATS, ids=str)


# --- 7: limits ---


@FORMATS
def test_the_limits_that_are_measured_are_the_formats(dtype: torch.dtype) -> None:
    info, result = torch.finfo(dtype), LIMITS.measured(dtype)
    assert result.largest == info.max
    assert result.smallest_normal == info.smallest_normal
    assert result.smallest == info.smallest_normal * info.eps
    assert result.epsilon == info.eps


# --- 7: softmax and cross-entropy ---


@pytest.mark.parametrize("stable", [False, True], ids=["naive", "stable"])
def test_both_forms_are_pytorchs_in_float64(stable: bool) -> None:
    logits = torch.randn(random.randint(2, 9), dtype=torch.float64) * 5
    softmax, entropy = list(SOFTMAX.STABLE_OF.values()) if stable else list(SOFTMAX.STABLE_OF)
    for ours, theirs in (
        (softmax, lambda x: F.softmax(x, 0)),
        (entropy, lambda x: F.cross_entropy(x[None], torch.tensor([0]))),
    ):
        x = logits.clone().requires_grad_()
        expected = theirs(x)
        (gradient,) = torch.autograd.grad(expected.reshape(-1)[0], x)
        result = SOFTMAX.value_and_gradient(ours, logits, SOFTMAX.exactly)
        torch.testing.assert_close(result, (expected.detach(), gradient), rtol=1e-12, atol=1e-14)


@FORMATS
def test_stable_forms_stay_near_where_naive_ones_do_not(dtype: torch.dtype) -> None:
    logits = 100 + 8 * torch.randint(-2, 3, (5,)).float()  # numbers that every format holds
    logits[0] += 8
    epsilon = torch.finfo(dtype).eps
    for naive, stable in SOFTMAX.STABLE_OF.items():
        room = 40 if "entropy" in stable.__name__ else 4  # of a loss up to 40
        assert max(SOFTMAX.errors(stable, logits, dtype)) <= room * epsilon
        worst = SOFTMAX.errors(naive, logits, dtype)
        assert any(not error <= 0.5 for error in worst)


# --- 8: an autograd function ---


def _inputs() -> list[Tensor]:
    """Of any sizes, and positive: a sum in which terms cancel has no bound for its relative error."""
    a, b, n, m = (random.randint(2, 6) for _ in range(4))
    return [torch.rand(n, a), torch.rand(a, b), torch.rand(m, b)]


def test_the_gradients_by_hand_are_right() -> None:
    inputs = [tensor.double().requires_grad_() for tensor in _inputs()]
    assert torch.autograd.gradcheck(CUSTOM.Bilinear.apply, inputs)
    for function in (CUSTOM.InTheRegion, CUSTOM.InFloat32):
        assert torch.autograd.gradcheck(function.apply, inputs)


# --- 8: scalers ---


def test_small_gradients_are_lost_without_a_scale() -> None:
    off = SCALER.a_scaler(enabled=False)
    exact = SCALER.train(None, off)
    assert exact.zeros == 0
    assert exact.losses[-1] < exact.losses[0] / 5
    lost = SCALER.train(torch.float16, off)
    assert lost.zeros == 1
    assert set(lost.losses) == {lost.losses[0]}
    kept = SCALER.train(torch.float16, SCALER.a_scaler())
    assert kept.zeros < 0.05
    assert kept.losses[-1] == pytest.approx(exact.losses[-1], rel=0.05)


def _problem() -> tuple[nn.Module, Tensor, Tensor]:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    return model, torch.randn(32, 8), torch.randn(32, 1) * 2


def _exact(model: nn.Module, x: Tensor, target: Tensor, penalty: bool) -> Tensor:
    """The gradients in float64, by autograd alone."""
    model, x, target = model.double(), x.double(), target.double()
    parameters = list(model.parameters())
    loss = F.mse_loss(model(x), target)
    gradients = torch.autograd.grad(loss, parameters, create_graph=penalty)
    if penalty:
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        gradients = torch.autograd.grad(loss + norm, parameters)
    model.float()
    return torch.cat([gradient.flatten() for gradient in gradients])


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16], ids=str)
def test_recipes_give_the_gradients_of_float64(dtype: torch.dtype | None) -> None:
    model, x, target = _problem()
    room = {None: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}[dtype]
    whole = _exact(model, x, target, penalty=False)
    expected = {
        RECIPES.whole_batch: whole,
        RECIPES.accumulated: whole,
        RECIPES.clipped: whole * min(1, RECIPES.MAX_NORM / whole.norm().item()),
        RECIPES.penalised: _exact(model, x, target, penalty=True),
    }
    for recipe, exact in expected.items():
        result = torch.cat([g.flatten() for g in recipe(model, x, target, dtype)]).double()
        assert (result - exact).norm() <= room * exact.norm(), recipe.__name__
