"""The weight cache: every weight cast once a region, and never a stale copy used."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

import precast
from precast import engine
from precast.frames import regions
from precast.weights import WeightCache

Region = Callable[..., AbstractContextManager[object]]


@pytest.fixture(params=engine.ENGINES)
def _engine(request: pytest.FixtureRequest) -> Any:
    with engine.use_engine(request.param):
        yield


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the weights cast from here on."""
    from precast import weights

    made: list[tuple[int, ...]] = []
    for name in ("_graph_cast", "_plain_cast"):
        original = getattr(weights, name)

        def counted(tensor: Tensor, dtype: torch.dtype, original: Any = original) -> Tensor:
            made.append(tuple(tensor.shape))
            result: Tensor = original(tensor, dtype)
            return result

        monkeypatch.setattr(weights, name, counted)
    return made


def parameter(*shape: int) -> Parameter:
    return Parameter(torch.randn(shape))


@pytest.mark.usefixtures("_engine")
def test_a_weight_is_cast_once_for_the_outermost_region(casts: list[Any]) -> None:
    weight, bias, x = parameter(3, 3), parameter(3), torch.randn(2, 3)
    with precast.autocast("cpu"):
        for _ in range(3):
            F.linear(x, weight, bias)
            with precast.autocast("cpu"), torch.autocast("cpu"):
                F.linear(x, weight)
    assert sorted(casts) == [(3,), (3, 3)]
    with precast.autocast("cpu"):
        F.linear(x, weight)
    assert len(casts) == 3, "the cache ended with the region"


@pytest.mark.usefixtures("_engine")
def test_no_cache_where_it_is_switched_off(casts: list[Any]) -> None:
    weight, x = parameter(3, 3), torch.randn(2, 3)
    with precast.autocast("cpu", cache_enabled=False):
        F.linear(x, weight)
        with torch.autocast("cpu", cache_enabled=True):
            F.linear(x, weight)
    with torch.autocast("cpu", cache_enabled=False), precast.autocast("cpu"):
        F.linear(x, weight)
    assert len(casts) == 1


def in_place(weight: Parameter) -> None:
    with torch.no_grad():
        weight.zero_()


def by_optimizer(weight: Parameter) -> None:
    weight.grad = weight.detach().clone()
    torch.optim.SGD([weight], lr=1.0).step()


def by_a_fused_optimizer(weight: Parameter) -> None:
    """Which moves no version counter (2.13)."""
    weight.grad = weight.detach().clone()
    torch.optim.SGD([weight], lr=1.0, fused=True).step()


def through_a_view(weight: Parameter) -> None:
    with torch.no_grad():
        weight.view(-1).mul_(0)


def other_data(weight: Parameter) -> None:
    weight.data = torch.zeros_like(weight)


def other_data_and_the_old_kept(weight: Parameter) -> None:
    weight.old = weight.data
    weight.data = torch.zeros_like(weight)


def through_detached(weight: Parameter) -> None:
    weight.detach().copy_(torch.zeros_like(weight))


def loaded(weight: Parameter) -> None:
    holder = torch.nn.Module()
    holder.weight = weight
    holder.load_state_dict({"weight": torch.zeros_like(weight)})


WRITES = [
    in_place,
    by_optimizer,
    by_a_fused_optimizer,
    through_a_view,
    other_data,
    other_data_and_the_old_kept,
    through_detached,
    loaded,
]


@pytest.mark.usefixtures("_engine")
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_written_weight_is_never_stale(write: Any, mode: Any, frozen: bool) -> None:
    weight, x = parameter(3, 3).requires_grad_(not frozen), torch.randn(2, 3)
    with precast.autocast("cpu"):
        with mode():
            assert F.linear(x, weight).abs().sum() > 0
        write(weight)
        with mode():
            assert F.linear(x, weight).abs().sum() == 0


def transposed(weight: Parameter) -> None:
    weight.data = weight.data.t()


def of_another_shape(weight: Parameter) -> None:
    weight.data = torch.randn(5, 3)


def in_double(weight: Parameter) -> None:
    weight.data = weight.data.double()


def frozen_or_not(weight: Parameter) -> None:
    weight.requires_grad_(not weight.requires_grad)


@pytest.mark.usefixtures("_engine")
@pytest.mark.parametrize(
    "change", [*WRITES, transposed, of_another_shape, in_double, frozen_or_not]
)
@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("frozen", [False, True])
def test_what_happens_to_a_weight_between_regions_is_seen(
    change: Any, mode: Any, frozen: bool
) -> None:
    weight, x = parameter(3, 3).requires_grad_(not frozen), torch.randn(2, 3)

    def product(region: AbstractContextManager[object]) -> tuple[Any, ...]:
        with mode(), region:
            try:
                y = F.linear(x, weight)
            except RuntimeError:  # a float64 weight
                return ()
            return y.tolist(), y.dtype, y.requires_grad, y.is_inference()

    for _ in range(3):
        ours = product(precast.autocast("cpu", policy="torch"))
        assert ours == product(torch.autocast("cpu"))
        change(weight)


@pytest.mark.parametrize("write", WRITES)
def test_pytorchs_cache_is_stale_after_the_same_write(write: Any) -> None:
    weight, x = parameter(3, 3), torch.randn(2, 3)
    with torch.autocast("cpu"):
        F.linear(x, weight)
        write(weight)
        assert F.linear(x, weight).abs().sum() > 0


@pytest.mark.usefixtures("_engine")
def test_regions_of_two_dtypes_share_a_weight() -> None:
    weight, bias, x = parameter(3, 3), parameter(3), torch.randn(2, 3)

    def both(autocast: Region) -> Tensor:
        with autocast("cpu", dtype=torch.bfloat16):
            F.linear(x, weight, bias)
            with autocast("cpu", dtype=torch.float16):
                return F.linear(x, weight, bias)

    engine.unregister()
    with pytest.raises(RuntimeError, match="dtype"):
        both(torch.autocast)
    expected = F.linear(x.half(), weight.half(), bias.half())
    assert torch.equal(both(precast.autocast), expected)


@pytest.mark.usefixtures("_engine")
@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode])
def test_a_copy_made_without_gradients_still_carries_them_later(first: Any) -> None:
    weight, x = parameter(3, 3), torch.randn(2, 3)
    with precast.autocast("cpu"):
        with first():
            F.linear(x, weight)
        F.linear(x, weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype is torch.float32
    expected = x.bfloat16().sum(0).expand(3, 3).float()
    torch.testing.assert_close(weight.grad, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.usefixtures("_engine")
@pytest.mark.parametrize("name", ["linear", "scaled_dot_product_attention"])
def test_what_runs_in_inference_mode_gets_copies_without_gradient_as_in_pytorch(name: str) -> None:
    """By `requires_grad` of its mask, attention chooses its kernel in every mode (since PyTorch 2.14)."""
    weight, x = parameter(4, 4), torch.randn(2, 4, 4)
    arguments = (x, weight) if name == "linear" else (x, x, x, weight)

    def run(autocast: Any) -> list[Tensor]:
        results = []
        with autocast("cpu"):
            for mode in (nullcontext, torch.inference_mode, torch.no_grad, torch.inference_mode):
                with mode():
                    results += [getattr(F, name)(*arguments).detach() for _ in range(3)]
        return results

    assert all(map(torch.equal, run(precast.autocast), run(torch.autocast)))
    with precast.autocast("cpu"), torch.inference_mode():
        for _ in range(2):
            F.linear(x, weight)
        copy = regions.cache.cast(weight, torch.bfloat16, "cpu")
        assert copy is regions.cache.cast(weight, torch.bfloat16, "cpu")
        assert copy is not None
        assert not copy.requires_grad


@pytest.mark.usefixtures("_engine")
def test_freezing_and_unfreezing_inside_a_region_is_seen() -> None:
    weight, x = parameter(3, 3), torch.randn(2, 3)
    with precast.autocast("cpu"):
        F.linear(x, weight)
        weight.requires_grad_(False)
        assert not F.linear(x, weight).requires_grad
        weight.requires_grad_(True)
        assert F.linear(x, weight).requires_grad


@pytest.mark.usefixtures("_engine")
def test_a_thawed_weight_gets_back_the_copy_it_had(casts: list[Any]) -> None:
    weight, x = parameter(4, 4), torch.randn(3, 4)
    gradients = []
    for autocast in (torch.autocast, precast.autocast):
        with autocast("cpu"):
            loss = F.linear(x, weight).float().square().sum()
            for _ in range(2):
                weight.requires_grad_(False)
                F.linear(x, weight)
                weight.requires_grad_(True)
                loss = loss + F.linear(x * 3, weight).float().square().sum()
        gradients += torch.autograd.grad(loss, weight)
    assert torch.equal(*gradients)
    assert len(casts) == 2, "one copy for each state"


@pytest.mark.usefixtures("_engine")
def test_a_weight_written_while_it_is_frozen_is_not_stale_when_thawed() -> None:
    weight, x = parameter(3, 3), torch.randn(2, 3)
    with precast.autocast("cpu"):
        F.linear(x, weight)
        weight.requires_grad_(False)
        F.linear(x, weight)
        weight.zero_()
        weight.requires_grad_(True)
        assert F.linear(x, weight).abs().sum() == 0


@pytest.mark.usefixtures("_engine")
def test_several_uses_of_a_weight_give_pytorchs_gradient() -> None:
    weight, x = parameter(4, 4), torch.randn(3, 4)
    gradients = []
    for autocast in (torch.autocast, precast.autocast):
        with autocast("cpu"):
            loss = sum(F.linear(x * i, weight).float().square().sum() for i in range(3))
        gradients += torch.autograd.grad(loss, weight)
    assert torch.equal(*gradients)


def test_views_of_weights_are_cast_once_where_no_gradient_is_needed(casts: list[Any]) -> None:
    tied, x = parameter(4, 4), torch.randn(3, 4)
    with precast.autocast("cpu"), torch.no_grad():
        for _ in range(5):
            F.linear(x, tied.t())
    assert casts == [(4, 4)]


@pytest.mark.usefixtures("_engine")
@pytest.mark.parametrize(
    ("mode", "frozen"),
    [(nullcontext, True), (torch.no_grad, True), (torch.inference_mode, False)],
)
def test_what_pytorch_casts_at_every_use_is_held_from_its_second_use_on(
    mode: Any, frozen: bool, casts: list[Any]
) -> None:
    weight, x = parameter(4, 4).requires_grad_(not frozen), torch.randn(3, 4)
    for uses, made in ((1, 0), (2, 1), (1, 0), (5, 1)):
        casts.clear()
        with precast.autocast("cpu"), mode():
            for _ in range(uses):
                result = F.linear(x, weight)
        assert len(casts) == made
        assert torch.equal(result, F.linear(x.bfloat16(), weight.bfloat16()))


def test_a_view_that_needs_a_gradient_is_left_to_pytorchs_way(casts: list[Any]) -> None:
    tied, x = parameter(4, 4), torch.randn(3, 4)
    gradients = []
    for autocast in (torch.autocast, precast.autocast):
        with autocast("cpu"):
            loss = sum(F.linear(x, tied.t()).float().square().sum() for _ in range(3))
        gradients += torch.autograd.grad(loss, tied)
    assert torch.equal(*gradients)
    assert casts == []


def test_activations_are_not_cached(casts: list[Any]) -> None:
    with precast.autocast("cpu"):
        torch.mm(torch.randn(2, 3), torch.randn(3, 2))
    assert casts == []
    assert not any(regions.cache.leaves.values())


def test_inference_tensors_as_weights_are_cast_each_time() -> None:
    with torch.inference_mode():
        weight = Parameter(torch.randn(3, 3), requires_grad=False)
    x = torch.randn(2, 3)
    with precast.autocast("cpu"):
        with torch.inference_mode():
            assert F.linear(x, weight).abs().sum() > 0
            weight.zero_()
            assert F.linear(x, weight).abs().sum() == 0


def test_what_a_region_has_used_can_be_converted_by_exchange() -> None:
    model, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
    other = torch.nn.Linear(4, 4)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with mode(), precast.autocast("cpu"):
                model(x)
                model(x)
            model.double().float().load_state_dict(other.state_dict())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    with precast.autocast("cpu"):
        assert torch.equal(model(x), other(x))


def test_the_cache_keeps_no_frozen_weight_alive() -> None:
    weight = parameter(3, 3).requires_grad_(False)
    gone = weakref.ref(weight)
    cache = WeightCache()
    with torch.no_grad():
        assert cache.cast(weight, torch.bfloat16, "cpu") is None, "its first use"
        assert cache.cast(weight, torch.bfloat16, "cpu") is not None
        assert cache.cast(weight.t(), torch.bfloat16, "cpu") is not None
    del weight
    gc.collect()
    assert gone() is None
    assert not cache.leaves[torch.bfloat16]
    assert not cache._views


def test_weights_on_another_device_are_left_alone() -> None:
    weight = Parameter(torch.empty(3, 3, device="meta"))
    with precast.autocast("cpu"):
        assert F.linear(torch.empty(2, 3, device="meta"), weight).dtype is torch.float32
    cache, here = WeightCache(), parameter(3, 3)
    assert cache.cast(here, torch.bfloat16, "cpu") is not None
    assert cache.cast(here, torch.bfloat16, "cuda") is None
