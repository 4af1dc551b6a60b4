"""A custom function that notes what it runs in, in both styles and with either decorators."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from precast.autocast_mode.custom_function import custom_bwd, custom_fwd

Tensor = torch.Tensor
OURS = (custom_fwd, custom_bwd)
TORCHS = (torch.amp.custom_fwd, torch.amp.custom_bwd)


class State(NamedTuple):
    enabled: bool
    dtype: torch.dtype
    cache: bool

    @classmethod
    def now(cls) -> State:
        return cls(
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        )


def make_matmul(decorators: Any = OURS, style: str = "ctx", **options: Any) -> Any:
    """A Function for ``a @ b`` that notes the autocast state of its forward and of its backward."""
    fwd, bwd = (
        decorator(device_type="cpu", **o)
        for decorator, o in zip(decorators, (options, {}), strict=True)
    )

    class Backward(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        @bwd
        def backward(ctx: Any, gradient: Tensor) -> Any:
            Matmul.in_backward = State.now()
            a, b = ctx.saved_tensors
            return gradient @ b.mT, a.mT @ gradient

    if style == "ctx":

        class Matmul(Backward):
            @staticmethod
            @fwd
            def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
                Matmul.in_forward = State.now()
                ctx.save_for_backward(a, b)
                return a @ b

    else:

        class Matmul(Backward):  # type: ignore[no-redef]
            @staticmethod
            @fwd
            def forward(a: Tensor, b: Tensor) -> Tensor:
                Matmul.in_forward = State.now()
                return a @ b

            @staticmethod
            def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
                ctx.save_for_backward(*inputs)

    return Matmul


def operands(*dtypes: torch.dtype) -> list[Tensor]:
    return [torch.randn(3, 3).to(dtype).requires_grad_() for dtype in dtypes]


def run(function: Any, inputs: list[Tensor], region: Any) -> list[Tensor]:
    with region:
        output = function.apply(*inputs)
    return [output, *torch.autograd.grad(output.float().sum(), inputs)]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(left, right, strict=True))


BOTH = pytest.mark.parametrize("style", ["ctx", "setup_context"])
