"""Chapters 7 and 8 of `examples/` are right: formats, stable functions, regions, scalers, threads."""

from __future__ import annotations

import importlib
import math
import random

import pytest
import torch
from showing import mixed, plain
from torch import Tensor, nn
from torch.nn import functional as F

LIMITS = importlib.import_module("07_limits")
SOFTMAX = importlib.import_module("07_softmax")
DTYPES = importlib.import_module("08_dtypes")
REGIONS = importlib.import_module("08_regions")
CUSTOM = importlib.import_module("08_custom_function")
SCALER = importlib.import_module("08_scaler")
RECIPES = importlib.import_module("08_recipes")
SEVERAL = importlib.import_module("08_several")
THREADS = importlib.import_module("08_threads")
CHECKERBOARD = importlib.import_module("08_checkerboard")

FORMATS = pytest.mark.parametrize("dtype", LIMITS.FORMATS, ids=str)
ARITHMETIC = (torch.float32, torch.float16, torch.bfloat16)  # PyTorch has none in float8


# --- 7: limits ---


@FORMATS
def test_the_limits_that_are_measured_are_the_formats(dtype: torch.dtype) -> None:
    info, found = torch.finfo(dtype), LIMITS.measured(dtype)
    assert found.largest == info.max
    assert found.smallest_normal == info.smallest_normal
    assert found.smallest == info.smallest_normal * info.eps
    assert found.epsilon == info.eps


@pytest.mark.parametrize("dtype", ARITHMETIC, ids=str)
def test_there_and_back_is_what_pytorch_computes(dtype: torch.dtype) -> None:
    limits = LIMITS.measured(dtype)
    for y in (limits.smallest, limits.smallest / 2, limits.largest, 4 * limits.largest, 3.7):
        one, other = torch.ones((), dtype=dtype), torch.tensor(y, dtype=torch.float64).to(dtype)
        expected = (one * other / other).item()
        found = LIMITS.there_and_back(1, y, dtype)
        assert found == expected or (math.isnan(found) and math.isnan(expected))


@FORMATS
def test_only_within_its_limits_a_format_comes_back(dtype: torch.dtype) -> None:
    limits = LIMITS.measured(dtype)
    assert LIMITS.there_and_back(1, limits.smallest, dtype) == 1
    assert LIMITS.there_and_back(1, limits.largest, dtype) == 1
    assert math.isnan(LIMITS.there_and_back(1, limits.smallest / 2, dtype))
    saturates = torch.tensor(4 * limits.largest, dtype=torch.float64).to(dtype).float().isfinite()
    assert math.isnan(LIMITS.there_and_back(1, 4 * limits.largest, dtype)) is not bool(saturates)


def test_a_square_overflows_where_a_loss_does_not() -> None:
    x = torch.full((2, 4), random.uniform(70, 100))
    found = LIMITS.square_of_a_layer(x, torch.float16)
    exact = (4 * x[0, 0].item()) ** 2
    assert found["(y * y).mean()"] == math.inf
    for stable in ("(y.float() * y.float()).mean()", "F.mse_loss(y, 0)"):
        assert found[stable] == pytest.approx(exact, rel=2e-3)
    assert all(
        value == pytest.approx(exact, rel=2e-2)
        for value in LIMITS.square_of_a_layer(x, torch.bfloat16).values()
    )


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
        found = SOFTMAX.value_and_gradient(ours, logits, SOFTMAX.exactly)
        torch.testing.assert_close(found, (expected.detach(), gradient), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", ARITHMETIC, ids=str)
def test_rounding_after_each_operation_is_the_arithmetic_of_a_format(dtype: torch.dtype) -> None:
    # At most a unit in the last place apart, where exp and log round from another side. The largest
    # is there twice: of a loss near 0, what a float32 sum rounds on its way is all there is.
    different = torch.randn(5, dtype=torch.float64) * 3
    logits = torch.cat([different, different.max()[None]]).to(dtype)
    for function in SOFTMAX.STABLE_OF.values():
        native, _ = SOFTMAX.value_and_gradient(function, logits, SOFTMAX.exactly)
        emulated, _ = SOFTMAX.value_and_gradient(function, logits.double(), SOFTMAX.kept_in(dtype))
        torch.testing.assert_close(
            native.double(), emulated, rtol=8 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps
        )


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_region_keeps_losses_in_float32(dtype: torch.dtype) -> None:
    found = SOFTMAX.in_a_region(torch.randn(5), dtype)
    assert found["F.cross_entropy"][0] == torch.float32
    assert found["F.cross_entropy"][1] < 1e-6
    assert found["F.softmax"][0] == dtype
    assert found["F.softmax"][1] <= torch.finfo(dtype).eps


# --- 8: what regions do ---


@pytest.mark.parametrize("a", DTYPES.DTYPES, ids=str)
@pytest.mark.parametrize("b", DTYPES.DTYPES, ids=str)
def test_what_each_mixture_gives(a: torch.dtype, b: torch.dtype) -> None:
    sums = [
        DTYPES.result(DTYPES.OPERATORS["+"], a, b, region) for region in DTYPES.REGIONS.values()
    ]
    assert sums == [torch.promote_types(a, b)] * 3
    float64 = torch.float64 in (a, b)
    outside, theirs, ours = (
        DTYPES.result(DTYPES.OPERATORS["@"], a, b, region) for region in DTYPES.REGIONS.values()
    )
    assert outside == (a if a == b else None)
    assert theirs == ((a if a == b else None) if float64 else torch.bfloat16)
    assert ours == (torch.float64 if float64 else torch.bfloat16)


def test_regions_in_regions() -> None:
    low, half, full = torch.bfloat16, torch.float16, torch.float32
    ours = [low, half, full, "error", full, low, full]
    places = REGIONS.nested(REGIONS.precast.autocast)
    assert list(places.values()) == ours
    theirs = REGIONS.nested(torch.autocast)
    assert {place for place in places if theirs[place] != places[place]} == {
        "  in a float16 region in it"
    }


def test_what_stays_on() -> None:
    assert set(REGIONS.on_afterwards(torch.autocast).values()) == {True}
    assert set(REGIONS.on_afterwards(REGIONS.precast.autocast).values()) == {False}


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


def test_functions_in_a_region() -> None:
    inputs = _inputs()
    doubles = [tensor.double() for tensor in inputs]
    exact, gradients = CUSTOM.output_and_gradients(CUSTOM.Bilinear, doubles, plain)
    with pytest.raises(RuntimeError, match="same dtype"):
        CUSTOM.output_and_gradients(CUSTOM.Bilinear, inputs, mixed)
    for function, dtype, room in (
        (CUSTOM.InTheRegion, torch.bfloat16, 0.05),
        (CUSTOM.InFloat32, torch.float32, 1e-5),
    ):
        output, found = CUSTOM.output_and_gradients(function, inputs, mixed)
        assert output.dtype == dtype
        assert {gradient.dtype for gradient in found} == {torch.float32}
        assert CUSTOM.error(found, gradients) < room
        assert CUSTOM.error([output], [exact]) < room


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


def test_a_scale_that_is_too_high_is_halved_until_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SCALER, "STEPS", 20)
    run = SCALER.train(torch.float16, SCALER.a_scaler(init_scale=2.0**40))
    falls = [after < before for before, after in zip(run.scales, run.scales[1:], strict=False)]
    fits = falls.index(False)
    assert run.skipped == sum(falls) >= fits > 2
    assert run.scales[: fits + 1] == [2.0 ** (40 - n) for n in range(fits + 1)]
    assert len(set(run.losses[: fits + 1])) == 1  # skipped: nothing is learnt
    assert run.losses[-1] < run.losses[0]


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
        found = torch.cat([g.flatten() for g in recipe(model, x, target, dtype)]).double()
        assert (found - exact).norm() <= room * exact.norm(), recipe.__name__


def test_clipping_too_early_divides_the_limit_by_the_scale() -> None:
    model, x, target = _problem()
    for dtype, norm in (
        (torch.float16, RECIPES.MAX_NORM / RECIPES.SCALE),
        (torch.bfloat16, RECIPES.MAX_NORM),
        (None, RECIPES.MAX_NORM),
    ):
        found = RECIPES.norm(RECIPES.clipped_too_early(model, x, target, dtype))
        assert found == pytest.approx(norm, rel=1e-3)


def test_one_overflow_skips_one_optimizer_and_lowers_the_scale_of_all() -> None:
    assert SEVERAL.two_models(broken=False) == SEVERAL.Step((True, True), 1024, 1024)
    assert SEVERAL.two_models(broken=True) == SEVERAL.Step((True, False), 1024, 512)


def test_a_scale_for_each_loss_keeps_the_small_one() -> None:
    torch.manual_seed(0)  # sizes of gradients decide how many bits one scale leaves
    model, x = nn.Linear(4, 2, bias=False), torch.randn(16, 4)
    exact = SEVERAL.gradients_in_float32(model, x)
    weight = model.weight.detach().double()
    by_hand = 2 * (x.double() @ weight.T).T @ x.double() / len(x)
    by_hand[1] *= SEVERAL.SIZES["tiny"]
    torch.testing.assert_close(exact.double(), by_hand, rtol=1e-4, atol=0)
    one = SEVERAL.gradients_with_one_scale(model, x)
    each = SEVERAL.gradients_with_a_scale_each(model, x)
    assert SEVERAL.error(one[1], exact[1]) > 0.05
    assert SEVERAL.error(each[1], exact[1]) < 0.01
    assert max(SEVERAL.error(found[0], exact[0]) for found in (one, each)) < 0.01


# --- 8: threads, and the checkerboard ---


def test_what_threads_see() -> None:
    expected = [torch.bfloat16, torch.float32, torch.bfloat16, torch.float16]
    assert list(THREADS.dtypes_seen().values()) == expected


def test_threads_change_no_result() -> None:
    model, parts = nn.Linear(5, 3), list(torch.randn(3, 4, 5))
    with mixed():
        expected = [model(part) for part in parts]
        found = THREADS.replicas(model, parts)
    assert all(map(torch.equal, found, expected))
    gradients = []
    for outputs in (expected, found):
        model.zero_grad()
        THREADS.backward_in_a_thread(torch.cat(outputs).float().square().sum())
        gradients.append(model.weight.grad.clone())
    torch.testing.assert_close(*gradients, rtol=0.02, atol=0.05)


def test_the_checkerboard_is_learnt_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CHECKERBOARD, "STEPS", 25)
    monkeypatch.setattr(CHECKERBOARD, "SIZE", 16)
    result = CHECKERBOARD.train()
    for run in (result.float32, result.mixed):
        assert run.losses[-1] < run.losses[0] / 2
    assert CHECKERBOARD.drawing(result.task.target) == ["  ##" * 4, "##  " * 4] * 4
