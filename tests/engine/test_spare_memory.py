"""Memory that the copies of one region leave to those of the next, where no gradients are recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import precast
from precast.engine import registration
from precast.weights.native import library
from precast.weights.native.api import native_engine
from tests.support.installed import uninstall_all

BF16, F16 = torch.bfloat16, torch.float16
WIDTH = 256  # a copy of WIDTH x WIDTH is 128 KiB, well over the least that is kept


@pytest.fixture(autouse=True)
def _native_engine() -> Iterator[None]:
    if isinstance(missing := library.load(), library.Unavailable):
        pytest.skip(f"needs the native engine: {missing.reason}")
    with registration.use_engine("native"):
        infer(weight(8, 8))  # the first operation of a thread runs on the reference
        torch.clear_autocast_cache()
        yield
        torch.clear_autocast_cache()


def spare_bytes() -> int:
    copies: Any = native_engine.api
    return int(copies.spare_bytes())


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*(shape or (WIDTH, WIDTH))))


def region(dtype: torch.dtype = BF16) -> precast.autocast:
    return precast.autocast("cpu", dtype=dtype)


def infer(*weights: Tensor, dtype: torch.dtype = BF16) -> list[Tensor]:
    with torch.no_grad(), region(dtype):
        return [F.linear(torch.ones(1, w.shape[1]), w) for w in weights]


def expected_of(*weights: Tensor, dtype: torch.dtype = BF16) -> list[Tensor]:
    """The same in 16 bits by hand."""
    return [F.linear(torch.ones(1, w.shape[1], dtype=dtype), w.detach().to(dtype)) for w in weights]


def same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert all(map(torch.equal, found, expected))
    assert not any(each.isnan().any() for each in found)


def test_the_next_region_has_the_memory_of_the_last() -> None:
    weights = [weight(), weight(2 * WIDTH, WIDTH), weight()]
    same(infer(*weights), expected_of(*weights))
    kept = spare_bytes()
    assert kept == sum(2 * w.numel() for w in weights)
    for _ in range(3):
        for w in weights:
            w.data.normal_()
        same(infer(*weights), expected_of(*weights))
        assert spare_bytes() == kept


def test_a_copy_takes_it_at_its_first_use() -> None:
    w = weight()
    infer(w)
    with torch.no_grad(), region():
        assert spare_bytes() == 2 * w.numel()
        F.linear(torch.ones(1, WIDTH), w)
        assert spare_bytes() == 0
        F.linear(torch.ones(1, WIDTH), w)
    assert spare_bytes() == 2 * w.numel()


@pytest.mark.parametrize("enter", ["kept object", "new objects", "decorator", "install", "policy"])
def test_however_a_region_is_entered(enter: str) -> None:
    kept = region()
    w = weight()

    def forward() -> Tensor:
        return F.linear(torch.ones(1, WIDTH), w)

    def once() -> Tensor:
        contexts: dict[str, Callable[[], AbstractContextManager[object]]] = {
            "kept object": lambda: kept,
            "new objects": region,
            "decorator": nullcontext,
            "install": lambda: torch.autocast("cpu", dtype=BF16),
            "policy": lambda: precast.autocast("cpu", dtype=BF16, policy="default"),
        }
        with torch.no_grad(), contexts[enter]():
            return region()(forward)() if enter == "decorator" else forward()

    if enter == "install":
        precast.install("torch")
    try:
        for _ in range(3):
            once()
            assert spare_bytes() == 2 * w.numel()
    finally:
        if enter == "install":
            uninstall_all()


def test_small_copies_are_not_kept() -> None:
    infer(weight(64, 64))
    assert spare_bytes() == 0


def test_what_a_whole_region_did_not_take_is_freed() -> None:
    first, second = weight(), weight(2 * WIDTH, WIDTH)
    infer(first)
    infer(second)
    assert spare_bytes() == 2 * second.numel()


def test_a_region_that_records_gradients_frees_it() -> None:
    w = weight()
    infer(w)
    with region():
        assert spare_bytes() > 0
        F.linear(torch.ones(1, WIDTH), w).sum().backward()
        assert spare_bytes() == 0
    assert spare_bytes() == 0
    assert w.grad is not None


def test_clearing_pytorchs_cache_frees_it() -> None:
    infer(weight())
    torch.clear_autocast_cache()
    assert spare_bytes() == 0


def test_memory_that_somebody_reads_is_left_to_them() -> None:
    w = weight()
    with torch.no_grad(), region():
        F.linear(torch.ones(1, WIDTH), w)
        seen = torch.ops.precast_native.find(w, BF16)[0]
    assert spare_bytes() == 0
    expected = seen.clone()
    for _ in range(2):
        infer(weight(), weight())
    assert torch.equal(seen, expected)


def test_forward_derivatives_see_the_weights_tangent() -> None:
    w = torch.randn(WIDTH, WIDTH)
    tangent = torch.randn(WIDTH, WIDTH)
    x = torch.ones(1, WIDTH)
    infer(weight())
    with torch.autograd.forward_ad.dual_level(), torch.no_grad(), region():
        dual = torch.autograd.forward_ad.make_dual(nn.Parameter(w), tangent)
        found = torch.autograd.forward_ad.unpack_dual(F.linear(x, dual)).tangent
    assert found is not None
    assert torch.equal(found, F.linear(x.to(BF16), tangent.to(BF16)))


LAYOUTS: dict[str, Callable[[], nn.Parameter]] = {
    "contiguous": weight,
    "transposed": lambda: nn.Parameter(torch.randn(WIDTH, WIDTH).t()),
    "with holes": lambda: nn.Parameter(torch.randn(WIDTH, 2 * WIDTH)[:, ::2]),
    "expanded": lambda: nn.Parameter(torch.randn(1, WIDTH).expand(WIDTH, WIDTH)),
    "with an offset": lambda: nn.Parameter(torch.randn(WIDTH + 3, WIDTH)[3:]),
}

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["infer", "write", "train", "replace"]),
        st.lists(st.integers(0, 4), min_size=1, max_size=5),
        st.sampled_from([BF16, F16]),
    ),
    min_size=2,
    max_size=12,
)


@settings(max_examples=40)
@given(STEPS, st.lists(st.sampled_from(sorted(LAYOUTS)), min_size=5, max_size=5))
def test_results_are_pytorchs_whatever_came_before(steps: list[Any], layouts: list[str]) -> None:
    weights = [LAYOUTS[each]() for each in layouts]
    for act, places, dtype in steps:
        chosen = [weights[place] for place in places]
        if act == "infer":
            same(infer(*chosen, dtype=dtype), expected_of(*chosen, dtype=dtype))
        elif act == "write":
            with torch.no_grad():
                for each in chosen:
                    if (
                        0 not in each.stride()
                    ):  # what has one number in several places can't be written
                        each[:1].copy_(torch.randn(()))
        elif act == "replace":
            for place in places:
                weights[place] = LAYOUTS[layouts[place]]()
        else:
            with region(dtype):
                outputs = [F.linear(torch.ones(1, WIDTH), each) for each in chosen]
            same(outputs, expected_of(*chosen, dtype=dtype))
