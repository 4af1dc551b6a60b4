"""Quantised numbers are those of the oracle, bit for bit; so are the scales."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from precast.weights.float8.formats import Scaling
from precast.weights.float8.quantise import quantise
from tests.float8 import oracle

FORMS = {torch.float8_e4m3fn: oracle.E4M3, torch.float8_e5m2: oracle.E5M2}
SCALINGS = [
    Scaling(dtype, dim, powers_of_two)
    for dtype in FORMS
    for dim in (None, -1, 0)
    for powers_of_two in (False, True)
]
ids = [f"{s}{', powers of two' * s.powers_of_two}" for s in SCALINGS]


def assert_as_oracle(matrix: Tensor, scaling: Scaling) -> None:
    data, inverse = quantise(matrix, scaling)
    wanted, scales = oracle.quantised(
        matrix, FORMS[scaling.dtype], scaling.dim, powers_of_two=scaling.powers_of_two
    )
    assert data.dtype is scaling.dtype
    torch.testing.assert_close(data.double(), wanted, rtol=0, atol=0, equal_nan=True)
    inverses = scales.float().reciprocal()
    torch.testing.assert_close(
        inverse.expand_as(inverses), inverses, rtol=0, atol=0, equal_nan=True
    )


numbers = st.one_of(
    st.floats(width=32, allow_nan=False),
    st.sampled_from([0.0, -0.0, 1e-45, -1e-40, 1e-12, 448.0, 464.0, 1.75, math.inf, math.nan]),
    st.floats(-3, 3, width=32),
)


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    flat = draw(st.lists(numbers, min_size=rows * columns, max_size=rows * columns))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    return torch.tensor(flat, dtype=torch.float64).float().to(dtype).reshape(rows, columns)


@pytest.mark.parametrize("scaling", SCALINGS, ids=ids)
@given(matrix=matrices())
def test_any_matrix(scaling: Scaling, matrix: Tensor) -> None:
    assert_as_oracle(matrix, scaling)


@pytest.mark.parametrize("scaling", SCALINGS, ids=ids)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_normal_numbers(scaling: Scaling, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    assert_as_oracle(torch.randn(24, 40).mul(torch.randn(24, 1).exp() ** 3).to(dtype), scaling)


@pytest.mark.parametrize("dtype", FORMS)
def test_every_number_of_the_format_and_every_midpoint_between_two(dtype: torch.dtype) -> None:
    bits = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    exact = bits[bits.isfinite()].unique()
    midpoints = (exact[1:] + exact[:-1]) / 2
    everything = torch.cat([exact, midpoints])
    # The largest number is among them, so the scale is 1.
    assert_as_oracle(everything.float().reshape(1, -1), Scaling(dtype, -1, False))


def test_an_infinity_makes_nan_of_what_shares_its_scale() -> None:
    matrix = torch.tensor([[1.0, math.inf], [1.0, 2.0]])
    data, inverse = quantise(matrix, Scaling(torch.float8_e4m3fn, -1, True))
    read = data.float() * inverse
    assert read[0].isnan().all()
    assert read[1].equal(matrix[1])


def test_zeros_and_tiny_numbers_become_zeros() -> None:
    matrix = torch.tensor([[0.0, 0.0], [1e-40, -1e-18], [1e-12, 1e-12]])
    data, inverse = quantise(matrix, Scaling(torch.float8_e4m3fn, -1, False))
    read = data.float() * inverse
    assert not read[:2].any()
    torch.testing.assert_close(read[2], matrix[2])


def test_powers_of_two_scale_without_rounding() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(8, 16)
    inverse = quantise(matrix, Scaling(torch.float8_e4m3fn, -1, True)).inverse
    assert inverse.frexp().mantissa.eq(0.5).all()
    assert (matrix.abs() / inverse).max() <= 448
