"""Custom functions in torch.func transforms, in compiled code and in custom operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from precast.autocast_mode.custom_function import custom_bwd, custom_fwd
from precast.autocast_mode.region import autocast
from tests.support.functions import BOTH, OURS, State, make_matmul, operands, run, same

Tensor = torch.Tensor


def test_transforms_of_torch_func() -> None:
    function = make_matmul(OURS, "setup_context")
    a, b = operands(torch.float32, torch.float32)
    expected = run(function, [a, b], autocast("cpu"))
    with autocast("cpu"):
        gradient = torch.func.grad(lambda x: function.apply(x, b.detach()).float().sum())(
            a.detach()
        )
        batch = torch.func.vmap(lambda x: function.apply(x, b.detach()))(a.detach().expand(2, 3, 3))
    assert same([gradient], [expected[1]])
    assert same([batch[0]], [expected[0]])


@BOTH
@pytest.mark.parametrize("cast_inputs", [None, torch.float32])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does
def test_compiled_in_one_graph(style: str, cast_inputs: Any) -> None:
    class Matmul(torch.autograd.Function):  # as make_matmul, without a class that notes things
        if style == "ctx":

            @staticmethod
            @custom_fwd(device_type="cpu", cast_inputs=cast_inputs)
            def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
                ctx.save_for_backward(a, b)
                return a @ b

        else:

            @staticmethod
            @custom_fwd(device_type="cpu", cast_inputs=cast_inputs)
            def forward(a: Tensor, b: Tensor) -> Tensor:
                return a @ b

            @staticmethod
            def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
                ctx.save_for_backward(*inputs)

        @staticmethod
        @custom_bwd(device_type="cpu")
        def backward(ctx: Any, gradient: Tensor) -> Any:
            a, b = ctx.saved_tensors
            return gradient @ b.mT, a.mT @ gradient

    class Compiled:
        apply = staticmethod(torch.compile(Matmul.apply, backend="aot_eager", fullgraph=True))

    inputs = operands(torch.float32, torch.float32)
    torch.compiler.reset()
    assert same(run(Compiled, inputs, autocast("cpu")), run(Matmul, inputs, autocast("cpu")))


def test_the_setup_context_of_an_operator_is_decorated_itself() -> None:
    seen = []

    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        seen.append(State.now())
        [x] = ctx.saved_tensors
        return gradient * 2 * x

    def square(x: Tensor) -> Tensor:
        return x * x

    operator = torch.library.custom_op(
        "precast_test_autograd::square", square, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    operator.register_autograd(
        custom_bwd(backward, device_type="cpu"),
        setup_context=custom_fwd(setup_context, device_type="cpu"),
    )
    x = torch.ones(2, requires_grad=True)
    with autocast("cpu", torch.float16):
        y = operator(x)
    y.sum().backward()
    assert seen == [State(True, torch.float16, True)]
    assert torch.equal(x.grad, torch.full((2,), 2.0))
