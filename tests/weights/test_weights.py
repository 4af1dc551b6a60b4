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
from precast.engine import registration
from precast.engine.thread_state import regions
from precast.weights.weight_cache import WeightCache
from tests.support.casts import Casts

Region = Callable[..., AbstractContextManager[object]]


@pytest.fixture(params=registration.ENGINES)
def _engine(request: pytest.FixtureRequest) -> Any:
    with registration.use_engine(request.param):
        yield


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> Casts:
    """The weights cast from here on."""
    return Casts(monkeypatch)


def parameter(*shape: int) -> Parameter:
    return Parameter(torch.randn(shape))


@pytest.mark.usefixtures("_engine")
def test_a_weight_is_cast_once_for_the_outermost_region(casts: Casts) -> None:
    weight, bias, x = parameter(3, 3), parameter(3), torch.randn(2, 3)
    with precast.autocast("cpu"):
        for _ in range(3):
            F.linear(x, weight, bias)
            with precast.autocast("cpu"), torch.autocast("cpu"):
                F.linear(x, weight)
    assert len(casts) == 2
    with precast.autocast("cpu"):
        F.linear(x, weight)
    assert len(casts) == 3, "the cache ended with the region"


@pytest.mark.usefixtures("_engine")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_nested_weight_which_has_no_sizes_is_cast_as_by_pytorch(casts: Casts) -> None:
    parts = [torch.randn(3, 3), torch.randn(3, 3)]
    weight, x = (torch.nested.nested_tensor(parts, requires_grad=t) for t in (True, False))
    with torch.autocast("cpu"):
        expected = torch.matmul(x, weight)
    with precast.autocast("cpu"):
        results = [torch.matmul(x, weight) for _ in range(2)]
    assert len(casts) == 1
    model = torch.nn.Module()
    model.weight = Parameter(weight.detach())
    with precast.attach(model), precast.autocast("cpu"):
        results.append(torch.matmul(x, model.weight))
    for result in results:
        assert all(map(torch.equal, result.unbind(), expected.unbind()))


@pytest.mark.usefixtures("_engine")
def test_no_cache_where_it_is_switched_off(casts: Casts) -> None:
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


@pytest.mark.usefixtures("_engine")
def test_regions_of_two_dtypes_share_a_weight() -> None:
    weight, bias, x = parameter(3, 3), parameter(3), torch.randn(2, 3)

    def both(autocast: Region) -> Tensor:
        with autocast("cpu", dtype=torch.bfloat16):
            F.linear(x, weight, bias)
            with autocast("cpu", dtype=torch.float16):
                return F.linear(x, weight, bias)

    registration.unregister()
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
    with precast.autocast("cpu"):
        assert regions.cache.cast(weight, torch.bfloat16, "cpu") is not None
        with torch.inference_mode():
            assert regions.cache.cast(weight, torch.bfloat16, "cpu") is None


@pytest.mark.usefixtures("_engine")
def test_a_thawed_weight_gets_back_the_copy_it_had(casts: Casts) -> None:
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
    assert len(casts) == 1, "frozen, it is cast at each use, as by PyTorch"


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


def through_data(weight: Parameter) -> None:
    weight.data.add_(1)


def by_one_in_place(weight: Parameter) -> None:
    with torch.no_grad():
        weight.add_(1)


def through_numpy(weight: Parameter) -> None:
    weight.detach().numpy()[...] += 1


@pytest.mark.usefixtures("_engine")
@pytest.mark.parametrize("write", [through_data, through_numpy, by_one_in_place])
@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", ["trained", "frozen", "view", "frozen view"])
def test_what_no_counter_sees_is_seen_wherever_pytorch_sees_it(
    write: Any, mode: Any, kind: str
) -> None:
    """No copy is older than the one that PyTorch uses; where a counter sees the write, none is old."""

    def uses(region: AbstractContextManager[object]) -> list[float]:
        weight = Parameter(torch.zeros(3, 3), requires_grad="frozen" not in kind)
        found = []
        with region, mode():
            for _ in range(5):
                used = weight.t() if "view" in kind else weight
                found.append(F.linear(torch.ones(1, 3), used)[0, 0].item() / 3)
                write(weight)
        return found

    ours, theirs = uses(precast.autocast("cpu", policy="torch")), uses(torch.autocast("cpu"))
    assert theirs in ([0, 0, 0, 0, 0], [0, 1, 2, 3, 4])
    assert ours == ([0, 1, 2, 3, 4] if write is by_one_in_place else theirs)


@pytest.mark.usefixtures("_engine")
def test_what_graph_trees_manage_is_cast_at_each_use() -> None:
    """Replayed graphs write their outputs unseen, so PyTorch keeps no copies of them."""
    weight, x = parameter(3, 3), torch.ones(2, 3)

    def uses(region: AbstractContextManager[object]) -> list[float]:
        weight.data.fill_(1.0)
        with region:
            first = F.linear(x, weight)
            weight.data.zero_()
            return [first[0, 0].item(), F.linear(x, weight)[0, 0].item()]

    torch._C._set_cached_tensors_enabled(True)
    torch._C._add_cached_tensor(weight)
    try:
        found = uses(precast.autocast("cpu")), uses(torch.autocast("cpu"))
    finally:
        torch._C._remove_cached_tensor(weight)
        torch._C._set_cached_tensors_enabled(False)
    assert found == ([3.0, 0.0], [3.0, 0.0])
    assert uses(precast.autocast("cpu")) == [3.0, 3.0], "as PyTorch, of a leaf that requires grad"


def test_a_view_that_needs_a_gradient_is_left_to_pytorchs_way(casts: Casts) -> None:
    tied, x = parameter(4, 4), torch.randn(3, 4)
    gradients = []
    for autocast in (torch.autocast, precast.autocast):
        with autocast("cpu"):
            loss = sum(F.linear(x, tied.t()).float().square().sum() for _ in range(3))
        gradients += torch.autograd.grad(loss, tied)
    assert torch.equal(*gradients)
    assert len(casts) == 0


def test_activations_are_not_cached(casts: Casts) -> None:
    with precast.autocast("cpu"):
        torch.mm(torch.randn(2, 3), torch.randn(3, 2))
    assert len(casts) == 0
    assert len(regions.cache) == 0


def test_what_a_region_has_used_can_be_converted_by_exchange() -> None:
    model, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
    other = torch.nn.Linear(4, 4)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode(), precast.autocast("cpu"):
            model(x)
            model(x)
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            model.double().float().load_state_dict(other.state_dict())
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        torch.utils.swap_tensors(model.weight, other.weight)
        torch.utils.swap_tensors(model.weight, other.weight)
    with precast.autocast("cpu"):
        assert torch.equal(model(x), other(x))


def test_the_cache_keeps_no_frozen_weight_alive() -> None:
    weight = parameter(3, 3).requires_grad_(False)
    gone = weakref.ref(weight)
    cache = WeightCache()
    with torch.no_grad():
        for _ in range(2):
            assert cache.cast(weight, torch.bfloat16, "cpu") is None
            assert cache.cast(weight.t(), torch.bfloat16, "cpu") is None
    del weight
    gc.collect()
    assert gone() is None


def test_weights_on_another_device_are_left_alone() -> None:
    weight = Parameter(torch.empty(3, 3, device="meta"))
    with precast.autocast("cpu"):
        assert F.linear(torch.empty(2, 3, device="meta"), weight).dtype is torch.float32
    cache, here = WeightCache(), parameter(3, 3)
    assert cache.cast(here, torch.bfloat16, "cpu") is not None
    assert cache.cast(here, torch.bfloat16, "cuda") is None
