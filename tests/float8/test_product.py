"""Products and their gradients lie within one rounding of the accumulation of what the 8-bit numbers say."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import precast
from precast.errors import BannedOperationError
from precast.weights.float8 import formats
from precast.weights.float8.formats import Recipe, Scaling
from precast.weights.float8.linear import linear
from precast.weights.float8.product import multiply
from precast.weights.float8.quantise import Quantised, quantise
from precast.weights.float8.support import ProductMethod
from tests.float8 import oracle

RECIPES = {
    "by tensor": formats.BY_TENSOR,
    "powers of two": formats.POWERS_OF_TWO,
    "by row": formats.BY_ROW,
    "exact weight gradient": formats.EXACT_WEIGHT_GRADIENT,
}
recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
FORMS = {torch.float8_e4m3fn: oracle.E4M3, torch.float8_e5m2: oracle.E5M2}


def _has_kernel_on_cpu() -> bool:
    """PyTorch 2.13 computes `scaled_mm` on the CPU; earlier ones where oneDNN can."""
    one = Quantised(torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(()))
    rows = Quantised(one.data, torch.ones(16, 1))
    try:
        multiply(one, one, torch.bfloat16, ProductMethod.KERNEL, fast=True)
        multiply(rows, rows.t(), torch.bfloat16, ProductMethod.KERNEL, fast=True)
    except RuntimeError:
        return False
    return True


ways = pytest.mark.parametrize(
    "method",
    [
        ProductMethod.EMULATED,
        pytest.param(
            ProductMethod.KERNEL,
            marks=pytest.mark.skipif(
                not _has_kernel_on_cpu(), reason="this PyTorch has no scaled_mm on this CPU"
            ),
        ),
    ],
)


def exact(matrix: Tensor, scaling: Scaling) -> Tensor:
    """What the 8-bit numbers of a matrix stand for, in float64."""
    data, scales = oracle.quantised(
        matrix, FORMS[scaling.dtype], scaling.dim, powers_of_two=scaling.powers_of_two
    )
    return data / scales


def assert_within_one_rounding(got: Tensor, a: Tensor, b: Tensor) -> None:
    """`got` is `a @ b` but for the error of a float32 sum, two roundings of scales, and that of the result's dtype."""
    wanted, size = a @ b, a.abs() @ b.abs()
    sums = (a.shape[1] + 4) * 2.0**-24 * size
    ulp = torch.finfo(got.dtype).eps * wanted.abs() + torch.finfo(got.dtype).smallest_normal
    off = (got.double() - wanted).abs()
    assert (off <= sums + ulp).all(), f"{(off / (sums + ulp)).max():.3g} of what may be"


def operands(m: int, k: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(m * k + n)
    x = (torch.randn(m, k) * torch.randn(m, 1).exp()).to(dtype)
    return x, torch.randn(n, k) * torch.randn(n, 1).exp(), torch.randn(m, n).to(dtype)


SHAPES = [(1, 1, 1), (3, 5, 7), (16, 32, 48), (17, 200, 33), (64, 16, 16)]


@ways
@dtypes
@recipes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product_and_gradients(
    shape: tuple[int, int, int], recipe: Recipe, dtype: torch.dtype, method: ProductMethod
) -> None:
    x, w, above = operands(*shape, dtype)
    x.requires_grad_()
    w.requires_grad_()
    result = linear(x, w, recipe, method)
    grad_x, grad_w = torch.autograd.grad(result, (x, w), above)
    x, w = x.detach(), w.detach()
    assert result.dtype is dtype
    assert grad_x.dtype is dtype
    assert grad_w.dtype is torch.float32
    if method is ProductMethod.KERNEL and dtype is torch.float16 and recipe.by_row:
        # The kernel gives bfloat16 there.
        result, grad_x, grad_w = result.bfloat16(), grad_x.bfloat16(), grad_w.bfloat16()
    assert_within_one_rounding(result, exact(x, recipe.input), exact(w, recipe.weight).t())
    for_x = exact(above, recipe.gradient_for_input), exact(w, recipe.weight_for_input)
    assert_within_one_rounding(grad_x, *for_x)
    if recipe.exact_weight_gradient:
        for_w = above.double().t(), x.double()
    else:
        for_w = (
            exact(above, recipe.gradient_for_weight).t(),
            exact(x, recipe.input_for_weight),
        )
    assert_within_one_rounding(grad_w.to(result.dtype), *for_w)


@recipes
def test_without_a_gradient_the_result_is_the_same(recipe: Recipe) -> None:
    x, w, _ = operands(9, 40, 24, torch.bfloat16)
    with_gradient = linear(x, w.requires_grad_(), recipe, ProductMethod.EMULATED)
    with torch.no_grad():
        assert linear(x, w, recipe, ProductMethod.EMULATED).equal(with_gradient)


@recipes
@pytest.mark.parametrize("needs", ["x", "w"])
def test_only_what_needs_a_gradient_gets_one(recipe: Recipe, needs: str) -> None:
    x, w, above = operands(9, 40, 24, torch.bfloat16)
    both = torch.autograd.grad(
        linear(x.requires_grad_(), w.requires_grad_(), recipe, ProductMethod.EMULATED),
        (x, w),
        above,
    )
    x, w = x.detach().requires_grad_(needs == "x"), w.detach().requires_grad_(needs == "w")
    linear(x, w, recipe, ProductMethod.EMULATED).backward(above)
    got, none = (x, w) if needs == "x" else (w, x)
    assert got.grad is not None
    assert got.grad.equal(both["xw".index(needs)])
    assert none.grad is None


@recipes
def test_a_gradient_of_a_gradient_is_an_error(recipe: Recipe) -> None:
    x, w, _ = operands(9, 40, 24, torch.bfloat16)
    result = linear(x.requires_grad_(), w, recipe, ProductMethod.EMULATED)
    (gradient,) = torch.autograd.grad(result.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=rf"operand of shape \(24, 40\) .* '{recipe.rule}'"):
        gradient.sum().backward()


@pytest.mark.filterwarnings("ignore:float8 is emulated")
def test_the_error_of_a_second_derivative_names_rule_and_weight() -> None:
    """Also where the gradient depends on the weight alone, for which PyTorch returns none without an error."""
    policy = precast.Policy.load("default").replace(ops={"linear": "float8_rowwise"})
    model = nn.Sequential(nn.Sequential(nn.Linear(32, 16)), nn.Tanh())
    x = torch.randn(4, 32, requires_grad=True)
    with precast.autocast("cpu", policy=policy):
        result = model[0](x)
    (gradient,) = torch.autograd.grad(result.sum(), x, create_graph=True)
    match = (
        r"second derivative of the product with '0\.0\.weight' of Sequential .* 'float8_rowwise'"
    )
    with pytest.raises(BannedOperationError, match=match):
        torch.autograd.grad(gradient.sum(), model[0][0].weight)


def _weight_gradient(x: Tensor, w: Tensor, recipe: Recipe) -> tuple[Tensor, ...]:
    hidden = linear(x.exp(), w.exp(), recipe, ProductMethod.EMULATED)
    (gradient,) = torch.autograd.grad(hidden.sum(), w, create_graph=True)
    return torch.autograd.grad(gradient.sum(), x, allow_unused=True)


def _jacobian_product(x: Tensor, w: Tensor, recipe: Recipe) -> tuple[Tensor, ...]:
    result = linear(x, w, recipe, ProductMethod.EMULATED)
    above = torch.zeros_like(result).requires_grad_()
    (gradient,) = torch.autograd.grad(result, x, above, create_graph=True)
    return torch.autograd.grad(gradient, above, torch.ones_like(gradient), allow_unused=True)


def _hessian(x: Tensor, w: Tensor, recipe: Recipe) -> Any:
    def loss(value: Tensor) -> Tensor:
        return linear(value, w, recipe, ProductMethod.EMULATED).square().sum()

    return torch.autograd.functional.hessian(loss, x)  # type: ignore[no-untyped-call]


@recipes
@pytest.mark.parametrize("derive", [_weight_gradient, _jacobian_product, _hessian])
def test_no_second_derivative_is_silently_zero(derive: Any, recipe: Recipe) -> None:
    """PyTorch's `once_differentiable` gives None where only an operand or the gradient above is asked for."""
    x, w, _ = operands(4, 24, 16, torch.bfloat16)
    with pytest.raises(BannedOperationError, match=f"second derivative .* '{recipe.rule}'"):
        derive(x.requires_grad_(), w.requires_grad_(), recipe)


@pytest.mark.parametrize("recipe", [formats.BY_TENSOR, formats.POWERS_OF_TWO])
def test_forward_keeps_operands_in_8_bits_where_backward_can_use_them(recipe: Recipe) -> None:
    x, w, _ = operands(32, 48, 64, torch.bfloat16)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        linear(x.requires_grad_(), w.requires_grad_(), recipe, ProductMethod.EMULATED)
    assert sum(t.nbytes for t in kept) == x.numel() + w.numel() + 8


@recipes
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_reaches_the_result(recipe: Recipe, bad: float) -> None:
    x, w, _ = operands(4, 8, 3, torch.bfloat16)
    x[2, 5] = bad
    result = linear(x, w, recipe, ProductMethod.EMULATED)
    assert not result[2].isfinite().any()
    if recipe.by_row:
        assert result[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("precision", ["medium", "high"])
def test_the_emulation_does_not_depend_on_the_precision_of_float32_products(precision: str) -> None:
    x, w, _ = operands(64, 256, 64, torch.bfloat16)
    before = linear(x, w, formats.BY_TENSOR, ProductMethod.EMULATED)
    plain = quantise(x, formats.BY_TENSOR.input).data.float() @ w.t()
    set_to = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        after = linear(x, w, formats.BY_TENSOR, ProductMethod.EMULATED)
    finally:
        torch.set_float32_matmul_precision(set_to)
    assert plain.isfinite().all()
    assert after.equal(before)


@recipes
def test_strides_do_not_count(recipe: Recipe) -> None:
    x, w, _ = operands(9, 40, 24, torch.bfloat16)
    plain = linear(x, w, recipe, ProductMethod.EMULATED)
    scattered = torch.zeros(18, 120, dtype=x.dtype)[::2, ::3].copy_(x)
    torch.testing.assert_close(
        linear(scattered, w.t().contiguous().t(), recipe, ProductMethod.EMULATED), plain
    )
