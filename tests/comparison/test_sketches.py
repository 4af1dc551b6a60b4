"""Measurements: the fingerprint, the statistics and the sketch, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from precast.comparison import sketches
from precast.comparison.sketches import NUMBERS, SIZE, measure
from precast.engine import registration
from precast.weights.native.api import native_engine

SHAPES = [(1,), (40,), (129, 7), (64, 512), (3, 50, 333)]


def _fingerprint(tensor: Tensor) -> int:
    return int(measure(tensor)[:1].view(torch.int64)[0])


def _estimate(one: Tensor, other: Tensor) -> float:
    difference = measure(one) - measure(other)
    return float(difference[-SIZE:].square().sum())


def _difference(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return a difference: everywhere, in one channel, the same in each row, or a constant."""
    size = 10.0 ** float(torch.randint(-6, 1, (), generator=generator))
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64) * size
    if kind == "channel":
        keep = torch.zeros(shape, dtype=torch.float64)
        keep[..., int(torch.randint(0, shape[-1], (), generator=generator))] = 1.0
        return drawn * keep
    if kind == "rows":
        return (
            drawn.reshape(-1, shape[-1])[:1].expand(drawn.numel() // shape[-1], -1).reshape(shape)
        )
    if kind == "constant":
        return torch.full_like(drawn, size)
    return drawn


def test_distances_of_a_thousand_pairs_are_estimated_with_the_documented_error() -> None:
    kinds = ("everywhere", "channel", "rows", "constant")
    errors, estimates, truths = [], [], []
    for number in range(1000):
        generator = torch.Generator().manual_seed(number)
        shape = SHAPES[2 + number % 3]
        one = torch.randn(shape, generator=generator)
        other = (one.double() + _difference(kinds[number % 4], shape, generator)).float()
        true = float((one.double() - other.double()).square().sum())
        estimates.append(_estimate(one, other))
        truths.append(true)
        errors.append(estimates[-1] / true - 1)
    error, documented = torch.tensor(errors), math.sqrt(2 / SIZE)
    assert documented < 0.126
    assert abs(float(error.mean())) < 0.03
    assert float(error.std()) < 1.25 * documented
    assert float(error.abs().max()) < 6 * documented
    logs = torch.tensor([estimates, truths], dtype=torch.float64).log()
    assert float(torch.corrcoef(logs)[0, 1]) > 0.999


def test_a_difference_of_one_float32_rounding_in_one_element_is_exact() -> None:
    one = torch.randn(200, 300)
    other = one.clone()
    other[3, 4] = torch.nextafter(one[3, 4], torch.tensor(9.0))
    true = float((one.double() - other.double()).square().sum())
    assert _estimate(one, other) == pytest.approx(true, rel=1e-6)


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32),
        *(torch.int16, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn),
    ],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_fingerprint_sees_each_change(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 50).to(dtype)
    changed = tensor.clone()
    bits = changed.view(torch.uint8).view(-1)
    position = int(torch.randint(0, bits.numel(), ()))
    bits[position] ^= 1 if dtype is torch.bool else 1 << int(torch.randint(0, 8, ()))
    assert _fingerprint(tensor) == _fingerprint(tensor.clone())
    assert _fingerprint(tensor) != _fingerprint(changed)
    assert measure(tensor).shape == (NUMBERS,)


def test_a_fingerprint_sees_exchanges_and_changes_of_signs() -> None:
    tensor = torch.randn(300, 300)
    flipped = tensor.clone()
    flipped[5, 7], flipped[90, 2] = -flipped[5, 7], -flipped[90, 2]
    others = [tensor.T, tensor.flip(0), -tensor, flipped, tensor.roll(127, 1), tensor[:, :299]]
    assert len({_fingerprint(each) for each in (tensor, *others)}) == 7


def test_strides_do_not_count() -> None:
    tensor = torch.randn(30, 40)
    for one, other in ((tensor, tensor.T.contiguous().T), (tensor[:, ::2], tensor[:, ::2].clone())):
        assert _fingerprint(one) == _fingerprint(other)
        # The statistics are sums in float32, whose order depends on the memory.
        torch.testing.assert_close(measure(one)[1:], measure(other)[1:], rtol=1e-5, atol=1e-5)


def test_statistics_leave_out_what_is_not_finite() -> None:
    tensor = torch.randn(300, 200, dtype=torch.float64)
    tensor[3, 5], tensor[200, 7] = torch.inf, torch.nan
    finite = tensor[tensor.isfinite()]
    low, high, total, squares, nonfinite = measure(tensor)[1:-SIZE].tolist()
    assert nonfinite == 2
    assert low == float(finite.min())
    assert high == float(finite.max())
    assert total == pytest.approx(float(finite.sum()), rel=1e-9, abs=1e-9)
    assert squares == pytest.approx(float(finite.square().sum()))
    assert bool(measure(tensor)[-SIZE:].isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [*SHAPES, (129, 1000)])
@pytest.mark.parametrize("has_infinite", [False, True])
def test_compiled_code_measures_as_python_does(
    dtype: torch.dtype, shape: tuple[int, ...], has_infinite: bool
) -> None:
    assert registration.engine() == "reference" or native_engine.api is not None
    tensor = (torch.randn(shape) * 50).to(dtype)
    if has_infinite:
        tensor.view(-1)[-1], tensor.view(-1)[tensor.numel() // 2] = torch.nan, -torch.inf
    result = torch.zeros(NUMBERS, dtype=torch.float64)
    sketches._measure_blocks(tensor.reshape(-1), result)
    expected = measure(tensor)
    assert torch.equal(result[:1].view(torch.int64), expected[:1].view(torch.int64))
    torch.testing.assert_close(result[1:], expected[1:], rtol=1e-9, atol=1e-9)
