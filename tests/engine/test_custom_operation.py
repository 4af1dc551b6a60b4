"""An operation of `torch.library` with a derivative, under each rule that a policy can give it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import precast
from precast.engine import registration


@pytest.fixture(params=registration.ENGINES, autouse=True)
def _engine(request: pytest.FixtureRequest) -> Iterator[None]:
    with registration.use_engine(request.param):
        yield


@torch.library.custom_op("precast_neighbours::scaled_product", mutates_args=())
def scaled_product(x: Tensor, weight: Tensor, scale: float) -> Tensor:
    return (x @ weight) * scale


def _backward(ctx: Any, gradient: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    return gradient @ weight.mT * ctx.scale, x.mT @ gradient * ctx.scale, None


def _setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.scale = inputs[2]


scaled_product.register_autograd(_backward, setup_context=_setup)


@pytest.mark.parametrize(
    ("rule", "dtype"), [("lower", torch.bfloat16), ("fp32", torch.float32), ("keep", None)]
)
def test_a_custom_operation_follows_its_rule(rule: str, dtype: torch.dtype | None) -> None:
    name = "precast_neighbours::scaled_product"
    policy = precast.Policy.load("torch").replace(name=rule, ops={name: rule})
    weight, x = nn.Parameter(torch.randn(3, 3)), torch.randn(2, 3).half()
    with precast.autocast("cpu", policy=policy):
        if dtype is None:
            with pytest.raises(RuntimeError, match="dtype"):
                scaled_product(x, weight, 2.0)
            return
        result = scaled_product(x, weight, 2.0)
        assert torch.equal(result, scaled_product(x, weight, 2.0))
    expected = (x.to(dtype) @ weight.detach().to(dtype)) * 2.0
    assert result.dtype is dtype
    assert torch.equal(result, expected)
    result.sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, (x.to(dtype).mT @ torch.ones(2, 3, dtype=dtype) * 2).float())
