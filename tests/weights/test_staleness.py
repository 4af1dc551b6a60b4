"""A held copy of a weight is never another's: not after its memory was given away, nor a tracer's, nor a subclass's."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor

import precast
from precast.engine import registration
from precast.engine.thread_state import regions
from precast.weights.weight_cache import WeightCache


@pytest.fixture(params=registration.ENGINES, autouse=True)
def _engine(request: pytest.FixtureRequest) -> Iterator[None]:
    with registration.use_engine(request.param):
        yield


def ones(size: int = 3) -> Parameter:
    return Parameter(torch.ones(size, size))


class Named(Parameter):
    """A parameter of a class of its own."""


class Logged(Tensor):
    """A tensor that hears of every function it is given to."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        heard.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


heard: list[Any] = []
READS = ("__get__", "is_floating_point")
"""What kernels ask a tensor; to hide that from modes would cost every call."""


class Hearing(TorchFunctionMode):
    """Hears of every function that the program calls."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.heard.append(func.__name__)
        return func(*args, **(kwargs or {}))


def named() -> Tensor:
    return Named(torch.ones(3, 3))


def logged() -> Tensor:
    return torch.ones(3, 3).as_subclass(Logged).detach().requires_grad_()  # type: ignore[no-any-return]


def wrapping() -> Tensor:
    return TwoTensor(torch.ones(3, 3), torch.ones(3, 3)).requires_grad_()  # type: ignore[no-any-return]


def made_in_inference_mode() -> Tensor:
    with torch.inference_mode():
        return torch.ones(3, 3)


@pytest.mark.parametrize("make", [ones, named, logged, wrapping])
def test_a_weight_of_any_class_is_cast_again_when_written(make: Callable[[], Tensor]) -> None:
    x = torch.ones(2, 3)

    def before_and_after(region: Any) -> tuple[float, float]:
        weight = make()
        with region, torch.no_grad():
            before = float(F.linear(x, weight)[0, 0])
            weight.mul_(0)
            return before, float(F.linear(x, weight)[0, 0])

    assert before_and_after(precast.autocast("cpu")) == (3.0, 0.0)


def test_pytorch_keeps_the_copy_of_a_subclass_that_was_written() -> None:
    weight, x = named(), torch.ones(2, 3)
    with torch.autocast("cpu"):
        F.linear(x, weight)
        with torch.no_grad():
            weight.mul_(0)
        assert F.linear(x, weight)[0, 0] == 3.0


@pytest.mark.parametrize("make", [named, wrapping])
def test_a_weight_of_any_class_gives_pytorchs_gradient(make: Callable[[], Tensor]) -> None:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(4, 3, generator=draw)

    def gradient(region: Any) -> Any:
        weight = make()
        with region:
            uses = [F.linear(x * i, weight).float().square().sum() for i in range(1, 4)]
            return torch.autograd.grad(sum(uses), weight)[0]

    ours, theirs = gradient(precast.autocast("cpu")), gradient(torch.autocast("cpu"))
    assert type(ours) is type(theirs)
    assert torch.equal(getattr(ours, "a", ours), getattr(theirs, "a", theirs))


def test_a_cast_is_no_call_of_the_programs() -> None:
    weight, x = logged(), torch.ones(2, 3)
    heard.clear()
    with precast.autocast("cpu"):
        F.linear(x, weight)
        F.linear(x, weight)
    assert heard == [F.linear, F.linear]


@pytest.mark.parametrize("policy", ["torch", "default"])
def test_a_function_mode_hears_what_it_hears_in_pytorchs_region(policy: str) -> None:
    def calls(region: Any) -> list[str]:
        weight, scripted = ones(), torch.jit.trace(F.linear, (torch.ones(2, 3), torch.ones(3, 3)))
        with region, Hearing() as mode:
            x = F.linear(torch.ones(2, 3), weight)
            scripted(F.gelu(x), weight).sum().backward()
        return [name for name in mode.heard if name not in READS]

    assert calls(precast.autocast("cpu", policy=policy)) == calls(torch.autocast("cpu"))


@pytest.mark.parametrize("size", [4, 64, 256, 512])
def test_memory_given_to_other_data_of_the_same_weight(size: int) -> None:
    # Setting `.data` leaves the version counter, and twice in a row can bring the first address back.
    weight, x = ones(size), torch.ones(2, size)
    with precast.autocast("cpu"):
        for _ in range(20):
            F.linear(x, weight)
            weight.data = weight.data * 2
            weight.data = weight.data * 0.25
            assert F.linear(x, weight)[0, 0] == size * weight[0, 0]


def test_a_copy_ends_with_the_memory_of_its_source() -> None:
    weight, cache = ones(), WeightCache()
    copy = cache.cast(weight, torch.bfloat16, "cpu")
    assert copy is not None
    gone = weakref.ref(copy)
    del copy
    weight.data = torch.zeros(3, 3)
    gc.collect()
    assert gone() is None


def test_views_with_one_geometry_and_two_signs() -> None:
    weight = Parameter(torch.randn(3, 3, dtype=torch.complex64), requires_grad=False)
    x = torch.randn(2, 3)
    with precast.autocast("cpu"):
        assert torch.equal(F.linear(x, weight.imag), -F.linear(x, weight.conj().imag))


def test_a_view_with_a_tangent_is_not_one_without() -> None:
    weight, tangent = ones().requires_grad_(False), torch.randn(3, 3)
    x = torch.randn(2, 3)

    def pushed(used: Tensor) -> Tensor | None:
        found: Tensor | None = forward_ad.unpack_dual(F.linear(x, used)).tangent
        return found

    with precast.autocast("cpu", dtype=torch.bfloat16), forward_ad.dual_level():
        expected = F.linear(x.bfloat16(), tangent.bfloat16())
        for _ in range(2):
            assert pushed(weight.view(3, 3)) is None
            found = pushed(forward_ad.make_dual(weight, tangent))
            assert found is not None
            assert torch.equal(found, expected)


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad])
def test_a_weight_closed_over_in_a_transformed_function(transform: Any) -> None:
    weight, x = ones(), torch.ones(3)
    called = transform(lambda x: torch.mm(x.expand(1, 3), weight).float().sum())
    with precast.autocast("cpu"):
        first = called(x)
        with torch.no_grad():
            weight.mul_(2)
        assert torch.equal(called(x), 2 * first)
        assert first.abs().min() > 0


@pytest.mark.parametrize(("transform", "expected"), [(torch.vmap, 18.0), (torch.func.grad, 6.0)])
def test_a_weight_used_before_and_after_a_transformed_function(
    transform: Any, expected: float
) -> None:
    weight, x = ones(), torch.ones(3)
    called = transform(lambda x: torch.mm(x.expand(1, 3), weight).float().sum())
    with precast.autocast("cpu"):
        torch.mm(torch.ones(1, 3), weight)
        with torch.no_grad():
            weight.mul_(2)
        assert (called(x) == expected).all()
        result = torch.mm(torch.ones(1, 3), weight)
    assert (result == 6.0).all()
    assert (torch.autograd.grad(result.sum(), weight)[0] == 1.0).all()


def test_pytorch_is_stale_under_vmap() -> None:
    weight, x = ones(), torch.ones(2, 3)
    with torch.autocast("cpu"):
        called = torch.vmap(lambda x: torch.mm(x[None], weight).float())
        called(x)
        with torch.no_grad():
            weight.mul_(2)
        assert (called(x) == 3.0).all()


def test_a_weight_made_in_inference_mode_is_cast_each_time() -> None:
    weight, x = made_in_inference_mode(), torch.ones(2, 3)
    with precast.autocast("cpu"), torch.inference_mode():
        weight.requires_grad_()
        F.linear(x, weight)
        with torch.no_grad():
            weight.mul_(0)
        assert F.linear(x, weight).sum() == 0


def test_a_weight_made_in_inference_mode_that_got_other_data() -> None:
    # It is no inference tensor then, by what it says, and counts no versions all the same.
    with torch.inference_mode():
        weight = ones()
    weight.data = torch.ones(3, 3)
    x = torch.ones(2, 3)
    with precast.autocast("cpu"):
        assert F.linear(x, weight).sum() == 18
        weight.data = torch.zeros(3, 3)
        assert F.linear(x, weight).sum() == 0


def test_fake_tensors_leave_nothing_in_the_cache() -> None:
    weight, x = ones(), torch.ones(2, 3)
    with precast.autocast("cpu"):
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            assert type(F.linear(fake.from_tensor(x), weight)) is not Tensor
            F.linear(fake.from_tensor(x), fake.from_tensor(weight))
        assert len(regions.cache) == 0
        result = F.linear(x, weight)
    assert type(result) is Tensor
    assert (result == 3).all()


def test_pytorch_gives_a_real_weight_the_copy_of_a_tracer() -> None:
    weight, x = ones(), torch.ones(2, 3)
    with torch.autocast("cpu"):
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            F.linear(fake.from_tensor(x), weight)
        assert type(F.linear(x, weight)) is not Tensor


@pytest.mark.usefixtures("_engine")
def test_a_weight_that_got_data_in_inference_mode_is_cast_each_time() -> None:
    """Its writes are counted no longer: PyTorch goes on with the copy of before."""
    weight, x = Parameter(torch.ones(2, 2)), torch.ones(1, 2)
    found = []
    with precast.autocast("cpu"):
        for times in range(4):
            with torch.inference_mode():
                weight.data = torch.ones(2, 2) if times == 0 else weight.data.mul_(2)
            found.append(F.linear(x, weight)[0, 0].item())
            found.append(F.linear(x, weight)[0, 0].item())
    assert found == [2, 2, 4, 4, 8, 8, 16, 16]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("is_attached", [False, True])
def test_a_call_of_clear_autocast_cache_shows_writes_through_data(
    mode: Callable[[], Any], is_attached: bool
) -> None:
    """PyTorch's own remedy, inside a region and between two."""
    layer, x = torch.nn.Linear(200, 200, bias=False), torch.ones(1, 200)
    attachment = precast.attach(layer) if is_attached else None
    with mode():
        with torch.no_grad():
            layer.weight.fill_(1.0)
        with precast.autocast("cpu"):
            layer(x)
            layer.weight.data.fill_(2.0)
            torch.clear_autocast_cache()
            assert (layer(x) == 400.0).all()
        layer.weight.data.fill_(3.0)
        torch.clear_autocast_cache()
        with precast.autocast("cpu"):
            assert (layer(x) == 600.0).all()
    if attachment is not None:
        attachment.detach()
