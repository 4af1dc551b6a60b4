"""The rounding error of products in 8 bits, by the length of the sums and the size of a row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from precast.engine.float8_kernels import RECIPES
from precast.policy.policy import Rule
from precast.weights.float8.linear import linear
from precast.weights.float8.support import ProductMethod

RULES = (Rule.FLOAT8, Rule.FLOAT8_POW2, Rule.FLOAT8_ROWWISE)


def relative_error(rule: Rule | None, x: Tensor, w: Tensor, row: slice = slice(None)) -> float:
    """Return the error of ``x @ w.T`` in 8 bits, or in bfloat16 if `rule` is None, against float64."""
    exact = (x.double() @ w.double().t())[row]
    low = x.bfloat16()
    product = (
        low @ w.bfloat16().t()
        if rule is None
        else linear(low, w, RECIPES[rule], ProductMethod.EMULATED)
    )
    return ((product.double()[row] - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("length", [64, 1024, 16384])
def test_the_error_does_not_grow_with_the_length_of_the_sums(rule: Rule, length: int) -> None:
    x, w = torch.randn(64, length), torch.randn(64, length)
    assert 0.033 <= relative_error(rule, x, w) <= 0.042


def test_a_scale_for_each_row_preserves_small_rows() -> None:
    x, w = torch.randn(64, 1024), torch.randn(64, 1024)
    x[-1] *= 1e-6
    last = slice(-1, None)
    assert relative_error(None, x, w, last) < 0.01
    assert relative_error(Rule.FLOAT8, x, w, last) > 0.99
    assert relative_error(Rule.FLOAT8_ROWWISE, x, w, last) < 0.06
