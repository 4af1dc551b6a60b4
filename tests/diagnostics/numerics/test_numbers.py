"""What is counted of a tensor, and what it would be in other formats: against float64 and PyTorch's own casts."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.cuda_graphs import counted_waits
from precast.diagnostics.numerics import tally as tally_of
from precast.diagnostics.numerics.bins import EDGES, Magnitudes, exponents, what_if
from precast.diagnostics.numerics.formats import FORMATS, WHAT_IF
from precast.diagnostics.numerics.host_transfer import on_host
from precast.diagnostics.numerics.tally import TensorTally, countable
from tests.support.scaling import bits

Tensor = torch.Tensor
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
DTYPES += [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64]


def tallied(*tensors: Tensor) -> TensorTally:
    tally = TensorTally()
    for tensor in tensors:
        memory = countable(tensor)
        assert memory is not None
        tally.add(memory)
    return tally


def magnitudes(*tensors: Tensor) -> Magnitudes:
    return tallied(*tensors).read().magnitudes


def figures(*tensors: Tensor) -> dict[str, Any]:
    return tallied(*tensors).read().figures


# --- formats ---


BITS = {  # of the exponent and of the mantissa
    "float32": (8, 23),
    "float16": (5, 10),
    "bfloat16": (8, 7),
    "float8_e4m3fn": (4, 3),
    "float8_e5m2": (5, 2),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_formats_numbers_are_those_of_its_definition(name: str) -> None:
    exponent_bits, mantissa_bits = BITS[name]
    format, steps = FORMATS[name], 2**mantissa_bits
    lowest = 2 - 2 ** (exponent_bits - 1)  # of the exponents of normal numbers
    assert format.infinities is (name != "float8_e4m3fn")
    if format.infinities:  # all of the largest exponent is infinity and NaN
        assert format.largest == (2 - 1 / steps) * 2.0 ** (1 - lowest)
    else:  # of the largest exponent one pattern is NaN
        assert format.largest == (2 - 2 / steps) * 2.0 ** (2 - lowest)
    assert format.smallest_normal == 2.0**lowest
    assert format.smallest_subnormal == 2.0 ** (lowest - mantissa_bits)


@pytest.mark.parametrize("name", WHAT_IF)
def test_a_formats_edges_are_where_pytorch_rounds_out_of_it(name: str) -> None:
    format, dtype = FORMATS[name], getattr(torch, name)
    for edge, what in (
        (format.zero_edge, lambda t: t == 0),
        (format.overflow_edge, lambda t: ~t.isfinite()),
        (format.normal_edge, lambda t: t.abs() >= format.smallest_normal),
    ):
        if edge == format.overflow_edge and torch.tensor(3.4028e38).to(dtype).float().isfinite():
            assert format.name == "float8_e4m3fn"  # it overflows into its largest number since 2.13
            continue
        tie = torch.tensor(edge)
        ends = torch.tensor([-math.inf, edge, math.inf])
        around = torch.nextafter(tie, ends).to(dtype).float()
        below, tie_itself, above = what(around).tolist()
        assert below is not above
        if what(torch.tensor(0.0)):
            assert tie_itself is below
        else:
            assert tie_itself is (
                above if format.infinities or edge == format.normal_edge else below
            )


# --- counts ---

SPECIAL = [
    0.0,
    -0.0,
    math.inf,
    -math.inf,
    math.nan,
    1.0,
    65504.0,
    65519.0,
    65520.0,
    2.0**-24,
    2.0**-25,
]
SPECIAL += [
    2.0**-14,
    448.0,
    464.0,
    465.0,
    57344.0,
    61440.0,
    3.3e38,
    3.4028234663852886e38,
    1e-40,
    1e-45,
]
SPECIAL += [5e-324, 1.7e308, 2.0**-126, 2.0**-133]
values = st.lists(
    st.one_of(
        st.sampled_from(SPECIAL),
        st.builds(math.ldexp, st.floats(-2, 2), st.integers(-60, 60)),
    ),
    max_size=40,
)


def tensor_of(numbers: list[float], dtype: torch.dtype, shape: str) -> Tensor:
    if dtype.is_complex:
        numbers = numbers[: len(numbers) // 2 * 2]
        pairs = torch.tensor(numbers, dtype=torch.float64).view(-1, 2).float()
        return torch.view_as_complex(pairs.contiguous())
    tensor = torch.tensor(numbers, dtype=torch.float64).to(dtype)
    if shape == "transposed" and len(numbers) % 2 == 0:
        return tensor.view(2, -1).t()
    if shape == "strided":
        return tensor.repeat_interleave(2)[::2]
    if shape == "scalar" and len(numbers) == 1:
        return tensor.squeeze(0)
    return tensor


@settings(max_examples=300)
@example([1.192092896e-07], torch.float64, "plain")  # a power of two in float32
@given(
    values, st.sampled_from(DTYPES), st.sampled_from(["plain", "transposed", "strided", "scalar"])
)
def test_counts_are_those_of_float64(numbers: list[float], dtype: torch.dtype, shape: str) -> None:
    tensor = tensor_of(numbers, dtype, shape)
    found = figures(tensor)
    exact = torch.view_as_real(tensor) if dtype.is_complex else tensor
    info = torch.finfo(exact.dtype)
    wide = exact.double().abs()
    nonzero = [x for x in wide.flatten().tolist() if math.isfinite(x) and x]
    assert found["elements"] == wide.numel()
    assert found["zeros"] == int((wide == 0).sum())
    assert found["nan"] == int(wide.isnan().sum())
    assert found["overflow"] == int(wide.isinf().sum())
    if exact.dtype is not torch.float64:
        assert found["saturated"] == int((wide == info.max).sum())
        assert found["subnormal"] == int(((wide < info.smallest_normal) & (wide > 0)).sum())
        assert (found["maximum"] or 0.0) == max(nonzero, default=0.0)
        squares = math.fsum(x * x for x in nonzero)
        finite = int(wide.isfinite().sum())
        assert math.isclose(found["rms"] or 0.0, math.sqrt(squares / max(finite, 1)), rel_tol=1e-6)
    expected: dict[int, int] = {}
    for x in nonzero:
        rounded = torch.tensor(x, dtype=torch.float32).item() or x  # what is counted of a float64
        m, e = math.frexp(min(rounded, 3.4028234663852886e38))
        exponent = max(e - 2 if m == 0.5 else e - 1, -127)
        expected[exponent] = expected.get(exponent, 0) + 1
    assert found["exponents"] == expected


def test_a_large_tensor_is_counted_in_pieces() -> None:
    tensor = torch.randn(3, 70_001)
    tensor[1, 5], tensor[2, 70_000] = math.inf, math.nan
    found = figures(tensor)
    assert (found["elements"], found["overflow"], found["nan"]) == (210_003, 1, 1)
    assert sum(found["exponents"].values()) == 210_001 - found["zeros"]
    finite = tensor[tensor.isfinite()].double()
    assert math.isclose(found["rms"], float(finite.square().mean().sqrt()), rel_tol=1e-9)


@pytest.mark.parametrize("size", [1, 1000, 1 << 18])
def test_keys_are_counted_alike_without_waiting(size: int) -> None:
    keys = torch.randint(0, tally_of._KEYS, (size,), dtype=torch.int32)
    keys[0], keys[-1] = 0, tally_of._KEYS - 1
    found = tally_of._counted_without_waiting(keys)
    assert torch.equal(found, torch.bincount(keys, minlength=tally_of._KEYS))
    every = torch.arange(tally_of._KEYS, dtype=torch.int32)
    assert torch.equal(
        tally_of._counted_without_waiting(every), torch.ones(len(every), dtype=torch.long)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_counts_the_same_without_waiting(dtype: torch.dtype) -> None:
    tensor = tensor_of([*SPECIAL, *torch.randn(5000).tolist()], dtype, "plain")
    there = tensor.cuda()
    with counted_waits() as waits:
        tally = tallied(there)
    assert waits == [0]
    found, expected = tally.read(), tallied(tensor).read()
    assert found.magnitudes == expected.magnitudes
    assert found.figures == expected.figures | {"rms": pytest.approx(expected.figures["rms"])}


def test_tensors_of_another_device_come_to_the_cpu_at_once() -> None:
    """They keep their bits."""

    class Elsewhere(Tensor):
        is_cpu = False
        copies = 0

        def cpu(self, *_: Any, **__: Any) -> Tensor:
            Elsewhere.copies += 1
            return self.as_subclass(Tensor)

    tensors = [
        torch.tensor([True, False, True]),
        torch.tensor([1.5, math.nan, -math.inf], dtype=torch.float16),
        torch.arange(6).reshape(2, 3).t(),
        torch.tensor(math.pi, dtype=torch.float64),
        torch.zeros(0),
        torch.tensor([math.nan, -0.0]),
    ]
    here = torch.ones(2)
    found = on_host([here, *(tensor.as_subclass(Elsewhere) for tensor in tensors)])
    assert Elsewhere.copies == 1
    assert list(map(bits, found)) == list(map(bits, [here, *tensors]))
    assert on_host([]) == []


def test_several_tensors_add_up() -> None:
    one, two = torch.randn(100), torch.randn(50) * 1e-3
    assert figures(one, two) == figures(torch.cat([one, two])) | {
        "rms": pytest.approx(figures(torch.cat([one, two]))["rms"])
    }


def test_what_has_no_numbers_is_not_looked_at() -> None:
    for tensor in (torch.arange(3), torch.ones(2, device="meta"), torch.ones(2) > 0):
        assert countable(tensor) is None


def test_of_sparse_tensors_the_stored_values_are() -> None:
    sparse = torch.sparse_coo_tensor([[0, 0, 5]], [1.0, 2.0, 0.0], (9,), check_invariants=True)
    found = figures(sparse)
    assert (found["elements"], found["zeros"], found["maximum"]) == (3, 1, 2.0)


# --- what if ---


def shares(tensor: Tensor, name: str, scale: float) -> dict[str, float]:
    """By PyTorch's own casts."""
    exact = tensor.double()
    exact = exact[exact.isfinite() & (exact != 0)] * scale
    there = exact.to(getattr(torch, name)).double()
    count, is_e4m3 = max(len(exact), 1), name == "float8_e4m3fn"
    small = (there != 0) & (there.abs() < FORMATS[name].smallest_normal)
    return {
        "underflow": int((there == 0).sum()) / count,
        # NaN until PyTorch 2.12, the largest number since: what is more than half a step away from it.
        "overflow": int((~there.isfinite() | (is_e4m3 & (exact.abs() > 464))).sum()) / count,
        "subnormal": int(small.sum()) / count,
    }


def in_top_bin(tensor: Tensor, edge: float, scale: float) -> float:
    """The share of numbers in the bin that `edge` is in, or that are the edge."""
    exact = tensor.double().abs()
    exact = exact[exact.isfinite() & (exact != 0)] * scale
    low, high = edge * 0.96, edge * 1.04
    return int(((exact >= low) & (exact <= high)).sum()) / max(len(exact), 1)


NORMAL = st.one_of(
    st.sampled_from([x for x in SPECIAL if abs(x) >= 1e-30 or x == 0 or math.isnan(x)]),
    st.builds(math.ldexp, st.floats(1, 2), st.integers(-60, 60)),
)


@settings(max_examples=300)
@given(
    st.lists(NORMAL, max_size=40), st.sampled_from([torch.float16, torch.bfloat16, torch.float32])
)
def test_what_if_is_what_pytorchs_casts_make(numbers: list[float], dtype: torch.dtype) -> None:
    tensor = torch.tensor(numbers, dtype=torch.float64).to(dtype)
    found = what_if([magnitudes(tensor)])
    for name in WHAT_IF:
        format = FORMATS[name]
        best = found[name]["best_scale"]
        largest = tensor.double().abs().nan_to_num(0.0, 0.0, 0.0).max().item() if numbers else 0.0
        if best is None:
            assert largest == 0.0
        else:
            assert largest * best <= format.largest
            assert best >= 1 or format.largest < largest * best * 2
            if largest * best * 2 <= format.largest:  # twice as much would lose as many
                zeros = shares(tensor, name, best)["underflow"]
                assert zeros == shares(tensor, name, best * 2)["underflow"]
            if best > 1:  # half of it would make something too small, as far as bins tell
                exact = tensor.double().abs()
                half = exact[exact.isfinite() & (exact > 0)].min().item() * best / 2
                assert half <= format.smallest_normal * 1.07
        for said, scale in ((found[name], 1.0), (found[name]["with_best"], best or 1.0)):
            exact = shares(tensor, name, scale)
            assert said["underflow"] == exact["underflow"]
            for share, edge in (
                ("overflow", format.overflow_edge),
                ("subnormal", format.normal_edge),
            ):
                assert said[share] == pytest.approx(
                    exact[share], abs=in_top_bin(tensor, edge, scale) + 1e-12
                )
        assert found[name]["with_best"]["overflow"] == 0.0


def test_float8_overflow_is_exact_to_the_tie() -> None:
    numbers = torch.tensor([448.0, 460.0, 464.0, 464.1, 480.0, 1e9])
    assert what_if([magnitudes(numbers)])["float8_e4m3fn"]["overflow"] == 0.5


def test_a_format_that_loses_nothing_needs_no_scale() -> None:
    """Nothing is gained by the largest scale there is, which is 2**149 for numbers of 1e-7 in bfloat16."""
    small = what_if([magnitudes(torch.full((8,), 1e-7))])
    assert small["bfloat16"]["best_scale"] == 1.0
    assert small["float16"]["best_scale"] == 2.0**10  # 2**-23.25 becomes 2**-13.25: normal
    assert what_if([magnitudes(torch.tensor([1.0, 2.0]))])["float16"]["best_scale"] == 1.0


def test_a_tensor_without_a_finite_number_has_no_largest() -> None:
    for numbers in ([math.nan], [math.inf, math.nan], []):
        found = figures(torch.tensor(numbers))
        assert found["maximum"] is found["rms"] is None
    assert figures(torch.tensor([math.nan, 0.0]))["maximum"] == 0.0


def test_a_power_stands_for_a_scale() -> None:
    """Gradients under a loss scale are judged without it."""
    gradients = torch.randn(1000) * 2.0**-22
    plain = magnitudes(gradients)
    scaled = magnitudes(gradients * 1024)
    unscaled = Magnitudes(scaled.low, scaled.counts, scaled.largest, -10)
    assert what_if([unscaled]) == what_if([plain])
    assert exponents(unscaled) == exponents(plain)
    halves: Any = [magnitudes(half) for half in gradients.split(500)]
    of_halves, of_all = what_if(halves), what_if([plain])
    for name in of_all:  # each half has a scale of its own for its rounding error, as in two steps
        assert of_halves[name].pop("error") == pytest.approx(of_all[name].pop("error"), rel=0.02)
    assert of_halves == of_all


def test_edges_are_the_upper_bits_of_float32() -> None:
    assert EDGES[0] == 0.0
    assert EDGES[127 * 16 : 127 * 16 + 3] == [1.0, 1.0625, 1.125]
    assert EDGES[-1] == 2.0**128
    assert all(a < b for a, b in itertools.pairwise(EDGES))


def test_of_no_numbers_nothing_is_said() -> None:
    for tensor in (torch.empty(0), torch.zeros(3), torch.tensor([math.nan, math.inf])):
        found = what_if([magnitudes(tensor)])
        assert found["float16"]["best_scale"] is None
        assert found["float16"]["underflow"] == found["float16"]["overflow"] == 0.0
