"""Chapters 1 to 5 of `examples/` are right: beside NumPy, float64, and what can be derived by hand."""

from __future__ import annotations

import importlib
import random
from types import ModuleType

import numpy as np
import pytest
import torch
from showing import mixed, plain

BFLOAT16 = 2.0**-8  # half of a bfloat16's relative step, with room for float32's sums
PLAIN_AND_MIXED = pytest.mark.parametrize("region", [plain, mixed], ids=["float32", "region"])


def example(name: str) -> ModuleType:
    return importlib.import_module(name)


# --- 1: tensors and gradients ---


def test_products_are_numpys_within_what_each_dtype_rounds() -> None:
    tensors, numbers = example("01_tensors"), np.random.default_rng()
    a, b = numbers.normal(size=(7, 30)), numbers.normal(size=(30, 5))
    exact, room = a @ b, np.abs(a) @ np.abs(b)
    assert (np.abs(tensors.product(a, b, plain).double().numpy() - exact) <= 1e-5 * room).all()
    lowered = tensors.product(a, b, mixed)
    assert lowered.dtype == torch.bfloat16
    assert (np.abs(lowered.double().numpy() - exact) <= 3 * BFLOAT16 * room).all()
    assert tensors.largest_error(lowered, exact) > tensors.largest_error(
        tensors.product(a, b, plain), exact
    )


def test_derivatives() -> None:
    gradients = example("01_gradients")
    assert gradients.derivative(gradients.negative_square, 1.0, plain) == -2
    at = random.uniform(-3, 3)
    for region in (plain, mixed):  # elementwise: a region changes nothing
        assert gradients.derivative(gradients.negative_square, at, region) == pytest.approx(-2 * at)
    rounded = torch.tensor(at).bfloat16().item()
    slope = gradients.derivative(gradients.negative_square_by_matmul, at, mixed)
    assert slope == -2 * rounded


# --- 2: modules ---


@pytest.mark.parametrize("name", ["parameters", "nn.Linear", "nn.Sequential"])
def test_modules_find_the_line(name: str) -> None:
    modules, seed = example("02_modules"), random.randrange(1000)
    for region, room in ((plain, 0.01), (mixed, 0.06)):  # bfloat16's steps near 5 are 1/32
        result = modules.fit(modules.MODELS[name], region, seed)
        assert result.slope == pytest.approx(5, abs=room)
        assert result.intercept == pytest.approx(3, abs=room)
        lowered = region is mixed and name != "parameters"
        assert result.output == (torch.bfloat16 if lowered else torch.float32)
        assert result.parameters == result.gradients == torch.float32


# --- 3: broadcasting ---


@PLAIN_AND_MIXED
def test_a_wrong_shape_learns_nothing_in_any_precision(region: object) -> None:
    broadcasting, seed = example("03_broadcasting"), random.randrange(1000)
    assert broadcasting.slope_found(True, region, seed) == pytest.approx(5, abs=0.06)
    assert abs(broadcasting.slope_found(False, region, seed)) < 1
    assert "must be the same" in broadcasting.refused(torch.zeros(3, 1), torch.zeros(3))


def test_merging_is_tiling() -> None:
    merge = example("03_merge")
    long, short_, units, batch, steps = (random.randint(2, 9) for _ in range(5))
    tiled, merged = merge.Tiled(long, short_, units), merge.Merge(long, short_, units)
    merge.same_weights(tiled, merged)
    sequence, vector = torch.randn(batch, steps, long), torch.randn(batch, short_)
    weight, bias = tiled.joined.weight.detach().double(), tiled.joined.bias.detach().double()
    exact = (
        torch.einsum("bsl,ul->bsu", sequence.double(), weight[:, :long])
        + torch.einsum("bv,uv->bu", vector.double(), weight[:, long:])[:, None]
        + bias
    )
    for model in (tiled, merged):
        torch.testing.assert_close(
            merge.step(model, plain, (sequence, vector)).double(), exact, atol=1e-5, rtol=1e-5
        )
        lowered = merge.step(model, mixed, (sequence, vector))
        assert lowered.dtype == torch.bfloat16
        torch.testing.assert_close(lowered.double(), exact, atol=0.1, rtol=0.02)


# --- 4: operators ---


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_loop_rounds_more_than_a_sum(dtype: torch.dtype) -> None:
    operators, x = example("04_operators"), (1 + torch.rand(400, 10)) / 4
    x[0] = 1 / torch.finfo(dtype).eps  # from here on to its double, the format counts by ones
    loop, unbound, together = (
        operators.error(way, x, dtype)
        for way in (operators.by_slices, operators.by_unbind, operators.by_sum)
    )
    assert loop == unbound
    assert together <= torch.finfo(dtype).eps < loop


# --- 5: TorchScript and vectorising ---


@pytest.mark.parametrize("trailing", [(), (3,), (2, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_gathers_are_equal_for_any_trailing_shape(
    trailing: tuple[int, ...], dtype: torch.dtype
) -> None:
    scripts = example("05_torchscript")
    batch, n, k = (random.randint(1, 6) for _ in range(3))
    x, indices = (torch.randn(batch, n, *trailing) * 9).to(dtype), torch.randint(n, (batch, k))
    expected = np.stack([x[i].float().numpy()[indices[i].numpy()] for i in range(batch)])
    for way in (
        scripts.gather,
        scripts.gather_by_loop,
        scripts.script(scripts.gather_by_loop),
        scripts.script(scripts.gather),
    ):
        result = way(x, indices)
        assert result.dtype == dtype
        assert np.array_equal(result.float().numpy(), expected)


# --- what they share ---
