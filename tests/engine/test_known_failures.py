"""What users of PyTorch's autocast run into: each test shows PyTorch's failure, and beside it what precast does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter
from torch.profiler import ProfilerActivity, profile

import precast
from precast.engine import registration

B, H, S, D = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.fixture(params=registration.ENGINES, autouse=True)
def _engine(request: pytest.FixtureRequest) -> Iterator[None]:
    with registration.use_engine(request.param):
        yield


def weight(*shape: int) -> Parameter:
    return Parameter(torch.randn(shape or (3, 3)))


def casts(region: Any, step: Callable[[], Any]) -> int:
    """How many tensors `step` copies to another dtype."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
        with region:
            step()
    return sum(event.count for event in seen.key_averages() if event.key == "aten::_to_copy")


def test_a_critic_that_is_clipped_between_its_steps_is_never_behind() -> None:
    """Weights written inside a region: PyTorch goes on with the copies it made before."""

    def train(region: Any) -> Tensor:
        torch.manual_seed(0)
        critic, x = nn.Linear(4, 1), torch.randn(8, 4)
        optimizer = torch.optim.SGD(critic.parameters(), lr=0.5)
        with region:
            for _ in range(4):
                optimizer.zero_grad()
                F.softplus(critic(x).float()).mean().backward()
                optimizer.step()
                with torch.no_grad():
                    for parameter in critic.parameters():
                        parameter.clamp_(-0.3, 0.3)
            return critic(x).detach()

    right = train(torch.autocast("cpu", cache_enabled=False))
    assert torch.equal(train(precast.autocast("cpu")), right)
    assert not torch.allclose(train(torch.autocast("cpu")), right, atol=0.05)


def test_a_float16_region_inside_a_bfloat16_one_shares_its_weights() -> None:
    shared, x = weight(), torch.randn(2, 3)

    def both(autocast: Any) -> tuple[Tensor, Tensor]:
        with autocast("cpu", B):
            first = F.linear(x, shared)
            with autocast("cpu", H):
                return first, F.linear(x, shared)

    with pytest.raises(RuntimeError, match="dtype"):
        both(torch.autocast)
    first, second = both(precast.autocast)
    assert torch.equal(first, F.linear(x.bfloat16(), shared.bfloat16()))
    assert torch.equal(second, F.linear(x.half(), shared.half()))
    (first.float().sum() + second.float().sum()).backward()
    assert shared.grad is not None
    assert shared.grad.dtype is S


def test_frozen_weights_of_an_attached_model_are_not_cast_at_each_use() -> None:
    model = nn.Module()
    model.frozen, model.low_rank = weight().requires_grad_(False), weight(3, 2)
    x = torch.randn(2, 3, dtype=B)

    def step() -> None:
        for _ in range(5):
            F.linear(x, model.frozen)

    def inference() -> None:
        with torch.no_grad():
            for _ in range(5):
                torch.mm(x, model.low_rank.t().T)
                torch.mm(x, model.frozen[:2].t())

    def count(autocast: Any, work: Callable[[], None]) -> int:
        return casts(autocast("cpu"), work)

    assert count(torch.autocast, step) == count(precast.autocast, step) == 5
    assert count(torch.autocast, inference) == count(precast.autocast, inference) == 10
    with precast.attach(model):
        count(precast.autocast, inference)
        count(precast.autocast, step)
        # Each held weight may be compared, or copied again, once: what earlier tests left decides whose turn it is.
        assert count(precast.autocast, step) <= 2
        assert count(precast.autocast, inference) <= 2


MIXED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index_add": lambda a, b: a.index_add(0, torch.arange(3), b),
    "index_copy": lambda a, b: a.index_copy(0, torch.arange(3), b),
    "index_put": lambda a, b: a.index_put((torch.arange(3),), b),
    "scatter": lambda a, b: a.scatter(0, torch.zeros(3, 3, dtype=torch.int64), b[:1].expand(3, 3)),
    "scatter_add": lambda a, b: a.scatter_add(0, torch.zeros(3, 3, dtype=torch.int64), b),
    "masked_scatter": lambda a, b: a.masked_scatter(a > 0, b),
    "lerp": lambda a, b: a.lerp(b, 0.5),
    "dot": lambda a, b: torch.dot(a[0], b[0]),
    "vdot": lambda a, b: torch.vdot(a[0], b[0]),
    "bilinear": lambda a, b: F.bilinear(a, b, b[None]),
    "embedding_bag": lambda a, b: F.embedding_bag(
        torch.tensor([[0, 2]]), a, per_sample_weights=b[:1, :2].contiguous(), mode="sum"
    ),
    "layer_norm": lambda a, b: F.layer_norm(a, (3,), b[0], b[1]),
    "grid_sample": lambda a, b: F.grid_sample(
        a[None, None], b.tanh()[None, :, :2][:, None], align_corners=False
    ),
    "cdist": torch.cdist,
    "householder": lambda a, b: torch.linalg.householder_product(a, b[0]),
}


@pytest.mark.parametrize("dtypes", [(S, B), (B, S), (B, H), (D, B), (H, D)], ids=str)
@pytest.mark.parametrize("name", MIXED)
def test_mixed_dtypes_run_in_the_widest_where_pytorch_raises(
    name: str, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    values = torch.randn(2, 3, 3).bfloat16().half()  # the same numbers in every dtype
    a, b = (value.to(dtype) for value, dtype in zip(values, dtypes, strict=True))
    widest = torch.promote_types(*dtypes)
    expected = MIXED[name](values[0].double(), values[1].double())
    try:
        with torch.autocast("cpu"):
            theirs = MIXED[name](a, b)
    except RuntimeError:
        with precast.autocast("cpu"):
            ours = MIXED[name](a, b)
        assert ours.dtype is widest
        torch.testing.assert_close(ours.double(), expected, rtol=1e-2, atol=1e-2)
        with precast.autocast("cpu", policy="torch"), pytest.raises(RuntimeError):
            MIXED[name](a, b)
    else:
        with precast.autocast("cpu"):
            assert torch.equal(MIXED[name](a, b), theirs)


def test_most_of_these_are_refused_by_pytorch() -> None:
    refused = set()
    for name, call in MIXED.items():
        try:
            with torch.autocast("cpu"):
                call(torch.randn(3, 3), torch.randn(3, 3).bfloat16())
        except RuntimeError:
            refused.add(name)
    assert len(refused) > len(MIXED) / 2


def test_float16_beside_bfloat16_and_float64() -> None:
    """The rule "promote" of PyTorch knows two dtypes; `default` knows all."""
    parts = [torch.ones(2, dtype=dtype) for dtype in (H, B, D)]
    with torch.autocast("cpu"), pytest.raises(RuntimeError, match="Unexpected floating"):
        torch.cat(parts)
    with precast.autocast("cpu"):
        assert torch.cat(parts[:2]).dtype is S
        assert torch.cat(parts).dtype is D
        assert torch.stack(parts[1:]).dtype is D


WRITES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "addmm_": lambda to, a, b: to.addmm_(a, b),
    "addbmm_": lambda to, a, b: to.addbmm_(a[None], b[None]),
    "addmv_": lambda to, a, b: to[0].addmv_(a, b[0]),
    "baddbmm_": lambda to, a, b: to[None].baddbmm_(a[None], b[None]),
    "index_add_": lambda to, a, b: to.index_add_(0, torch.arange(3), a),
    "scatter_add_": lambda to, a, b: to.scatter_add_(0, torch.zeros(3, 3, dtype=torch.int64), a),
    "index_put_": lambda to, a, b: to.index_put_((torch.arange(3),), a, accumulate=True),
    "lerp_": lambda to, a, b: to.lerp_(a, 0.5),
    "mm.out": lambda to, a, b: torch.mm(a, b, out=to),
    "bmm.out": lambda to, a, b: torch.bmm(a[None], b[None], out=to[None]),
    "addmm.out": lambda to, a, b: torch.addmm(a, a, b, out=to),
    "baddbmm.out": lambda to, a, b: torch.baddbmm(a[None], a[None], b[None], out=to[None]),
    "matmul.out": lambda to, a, b: torch.matmul(a, b, out=to),
}


@pytest.mark.parametrize("dtypes", [(S, B, S), (B, S, B), (H, B, S), (D, B, S)], ids=str)
@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_to_keeps_its_dtype_and_gets_the_result(
    name: str, dtypes: tuple[torch.dtype, ...]
) -> None:
    """PyTorch casts nothing for in-place and `out=` variants, and they refuse mixed dtypes."""
    values = torch.randn(3, 3, 3).bfloat16().half()
    expected = values.double()
    WRITES[name](*expected.unbind())

    def arguments() -> list[Tensor]:
        return [v.to(d, copy=True) for v, d in zip(values, dtypes, strict=True)]

    with torch.autocast("cpu"), pytest.raises(RuntimeError):
        WRITES[name](*arguments())
    ours = arguments()
    with precast.autocast("cpu"):
        result = WRITES[name](*ours)
    assert result.data_ptr() == ours[0].data_ptr()
    assert ours[0].dtype is dtypes[0]
    torch.testing.assert_close(ours[0].double(), expected[0], rtol=2e-2, atol=2e-2)


def test_an_object_that_is_entered_again_ends_where_it_began() -> None:
    def left_on(region: Any) -> bool:
        def recursive(depth: int) -> None:
            with region:
                if depth:
                    recursive(depth - 1)

        recursive(2)
        return torch.is_autocast_enabled("cpu")

    assert not left_on(precast.autocast("cpu"))
    try:
        assert left_on(torch.autocast("cpu"))
    finally:
        torch.set_autocast_enabled("cpu", False)
        torch.clear_autocast_cache()


def test_a_thread_takes_its_region_along() -> None:
    a = torch.ones(2, 2)
    found: dict[str, torch.dtype] = {}

    def work(name: str, region: Any) -> None:
        with region:
            found[name] = torch.mm(a, a).dtype

    with precast.autocast("cpu", H):
        here = precast.current_precision()
        threads = [
            threading.Thread(target=work, args=("left to itself", nullcontext())),
            threading.Thread(target=work, args=("taken along", here)),
        ]
        for thread in threads:
            thread.start()
            thread.join()
    assert found == {"left to itself": S, "taken along": H}
