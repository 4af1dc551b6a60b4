"""From float32 to bfloat16: to the nearest, or by chance so that the mean is right."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from precast.optim import rounding

BF16 = torch.bfloat16
DRAWS = 1 << 20


def of_bits(*bits: int) -> Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def below_and_above(number: float) -> tuple[float, float]:
    """The numbers of bfloat16 around one that is none, the smaller one first."""
    bits = torch.tensor(number).view(torch.int32)
    toward_zero = (bits & -0x10000).view(torch.float32).item()
    away = ((bits & -0x10000) + 0x10000).view(torch.float32).item()
    return min(toward_zero, away), max(toward_zero, away)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=2, max_size=64))
def test_nearest_is_what_a_cast_gives(bits: list[int]) -> None:
    numbers = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    rounded = rounding.nearest(numbers)
    torch.testing.assert_close(
        rounded, numbers.to(BF16).float(), rtol=0.0, atol=0.0, equal_nan=True
    )


@given(st.integers(-(2**31), 2**31 - 1), st.integers(-(2**31), 2**31 - 1))
def test_chance_gives_one_of_the_two_neighbours(bits: int, seed: int) -> None:
    numbers = torch.tensor([bits] * 8, dtype=torch.int32).view(torch.float32)
    rounded = rounding.stochastic(numbers, seed).float()
    assert torch.equal(rounded.to(BF16).float().nan_to_num(), rounded.nan_to_num())
    number = numbers[0].item()
    if not numbers.isfinite().all():
        torch.testing.assert_close(rounded, numbers, rtol=0.0, atol=0.0, equal_nan=True)
    elif numbers[0] == numbers[0].to(BF16):
        assert torch.equal(rounded, numbers)
    else:
        low, high = below_and_above(number)
        assert all(each in (low, high) for each in rounded.tolist())
        assert rounded.isfinite().all()


def test_the_mean_of_chance_is_the_number_itself_at_every_exponent() -> None:
    """Of a million draws, at most five deviations away; each exponent with its own share between two neighbours."""
    torch.manual_seed(0)
    for exponent in range(-126, 128, 2):
        share = torch.rand(()).item()
        number = (1.25 + share / 128) * 2.0**exponent * (-1 if exponent % 4 else 1)
        exact = torch.full((DRAWS,), number)
        low, high = below_and_above(exact[0].item())
        part = (exact[0].item() - low) / (high - low)
        half = exponent // 2 % 2
        rounded = rounding.stochastic(exact, int(torch.randint(2**31, ())), half).float()
        ups = (rounded == high).sum().item()
        assert ups + (rounded == low).sum().item() == DRAWS
        deviation = (part * (1 - part) * DRAWS) ** 0.5
        assert abs(ups - part * DRAWS) <= 5 * deviation + DRAWS / 65536


def test_the_least_numbers_are_rounded_by_chance_too() -> None:
    least = of_bits(0x4000).expand(DRAWS)  # a quarter of bfloat16's smallest number
    rounded = rounding.stochastic(least, 7).float()
    assert abs((rounded > 0).float().mean().item() - 0.25) < 0.003


def test_what_bfloat16_holds_is_never_moved() -> None:
    """All its numbers, and with each the largest and the least of chances; powers of two are the hard ones."""
    exact = of_bits(*range(-(2**31), 2**31, 2**16))
    exact = exact[exact.isfinite()]
    for seed in range(40):
        assert torch.equal(rounding.stochastic(exact, seed, seed % 2).float(), exact)
        powers = (2.0 ** torch.arange(-126, 128)).repeat_interleave(4096)
        assert torch.equal(rounding.stochastic(powers, seed).float(), powers)


def test_no_number_becomes_nan_where_the_processor_takes_the_least_for_zero() -> None:
    numbers = of_bits(*range(1, 2**31 - 2**24, 2**16 + 4099))
    numbers = numbers[numbers.isfinite()]
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not do that")
    try:
        rounded = rounding.stochastic(numbers, 3).float(), rounding.nearest(numbers)
    finally:
        torch.set_flush_denormal(False)
    assert all(each.isfinite().all() for each in rounded)


def test_compiled_to_vectors_it_gives_the_same_bits() -> None:
    """In rows that vectors divide and that they do not; no product is fused with a sum, which would round otherwise."""

    def both(numbers: Tensor, seed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first, second = (rounding.stochastic(numbers, seed, half) for half in (0, 1))
        return rounding.nearest(numbers), first, second

    compiled = torch.compile(both, dynamic=True, fullgraph=True)
    seed = torch.tensor(-123456, dtype=torch.int32)
    for count in (1 << 16, 100_003):
        numbers = torch.randint(-(2**31), 2**31, (count,)).to(torch.int32).view(torch.float32)
        for one, other in zip(both(numbers, seed), compiled(numbers, seed), strict=True):
            torch.testing.assert_close(one, other, rtol=0.0, atol=0.0, equal_nan=True)


def test_chances_of_places_and_seeds_have_nothing_to_do_with_each_other() -> None:
    half = torch.full((DRAWS,), 1.0 + 1 / 256)
    count, first = rounding.next_seed(41)
    _, second = rounding.next_seed(count)
    one, other = ((rounding.stochastic(half, seed).float() > 1).float() for seed in (first, second))
    for shift in (1, 2, 3, 8, 64, 1024):
        assert abs(torch.corrcoef(torch.stack([one[shift:], one[:-shift]]))[0, 1]) < 0.006
        assert abs(torch.corrcoef(torch.stack([one[shift:], other[:-shift]]))[0, 1]) < 0.006
    upper = (rounding.stochastic(half, first, 1).float() > 1).float()
    for another in (other, upper):
        assert abs(torch.corrcoef(torch.stack([one, another]))[0, 1]) < 0.006


def test_the_same_seed_gives_the_same() -> None:
    numbers = torch.randn(4096)
    first, again = (rounding.stochastic(numbers, 12345).float() for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, rounding.stochastic(numbers, 12346).float())


@pytest.mark.parametrize("count", [0, 1, 2**31, 2**63, 2**64 - 1])
def test_a_count_goes_on_and_its_seeds_are_32_bits(count: int) -> None:
    later, seed = rounding.next_seed(count)
    assert -(2**31) <= seed < 2**31
    assert later == (count + 1) % 2**64
    assert rounding.next_seed(later)[1] != seed
