"""Results and gradients are those of torchao's `Float8Linear` with `emulate=True`, for each of its recipes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from precast.weights.float8 import formats
from precast.weights.float8.formats import Recipe, Scaling
from precast.weights.float8.linear import linear
from precast.weights.float8.quantise import quantise
from precast.weights.float8.support import ProductMethod

float8 = pytest.importorskip("torchao.float8", reason="torchao is not installed")
utils = pytest.importorskip("torchao.float8.float8_utils")
RECIPES = {
    "tensorwise": formats.BY_TENSOR,
    "rowwise": formats.BY_ROW,
    "rowwise_with_gw_hp": formats.EXACT_WEIGHT_GRADIENT,
}


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dim", [None, -1, 0])
@pytest.mark.parametrize("powers_of_two", [False, True])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
def test_quantised_numbers_are_equal(
    dtype: torch.dtype, dim: int | None, powers_of_two: bool, source: torch.dtype
) -> None:
    granularity = utils.ScalingGranularity
    kind = granularity.TENSORWISE if dim is None else granularity.AXISWISE
    torch.manual_seed(0)
    for size in (1e-30, 1e-13, 1e-3, 1.0, 1e4, 1e30):
        matrix = (torch.randn(33, 65) * size).to(source)
        matrix[3] = 0
        scale = utils.tensor_to_scale(
            matrix,
            dtype,
            scaling_granularity=kind,
            axiswise_dim=dim,
            round_scales_to_power_of_2=powers_of_two,
        )
        wanted = utils.to_fp8_saturated(matrix.float() * scale, dtype)
        found = quantise(matrix, Scaling(dtype, dim, powers_of_two))
        assert found.inverse.equal(scale.reciprocal())
        assert found.data.view(torch.uint8).equal(wanted.view(torch.uint8))


def _theirs(name: str, x: Tensor, w: Tensor, above: Tensor) -> list[Tensor]:
    config: Any = float8.Float8LinearConfig.from_recipe_name(name)
    config = dataclasses.replace(config, emulate=True)
    model = nn.Sequential(nn.Linear(w.shape[1], w.shape[0], bias=False))
    model[0].weight.data = w.clone()
    float8.convert_to_float8_training(model, config=config)
    x = x.clone().requires_grad_()
    result = model(x)
    result.backward(above)
    assert model[0].weight.grad is not None
    assert x.grad is not None
    return [result.detach(), x.grad, model[0].weight.grad]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("shape", [(16, 32, 48), (40, 208, 96)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_and_gradients(name: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    recipe: Recipe = RECIPES[name]
    m, k, n = shape
    torch.manual_seed(k)
    x, w, above = torch.randn(m, k).to(dtype), torch.randn(n, k), torch.randn(m, n).to(dtype)
    theirs = _theirs(name, x, w, above)
    x.requires_grad_()
    w.requires_grad_()
    result = linear(x, w, recipe, ProductMethod.EMULATED)
    result.backward(above)
    ours = [result.detach(), x.grad, w.grad]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine is not None
        # They multiply by the scales before they add up, we afterwards; then both round to `dtype`.
        step = torch.finfo(dtype).eps * other.abs().double()
        off = (mine.double() - other.double()).abs()
        assert (off <= step + 1e-5 * other.abs().max()).all()
        assert (off == 0).double().mean() > 0.97
