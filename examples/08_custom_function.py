"""An autograd function of one's own: undecorated, decorated, and in a dtype that it insists on."""

from __future__ import annotations

from typing import Any

import torch
from showing import Region, mixed, plain, say, table
from torch import Tensor

import precast


class Bilinear(torch.autograd.Function):
    """x @ w @ y^T, and its gradients written by hand: float32 is all it thinks of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        """(n, a), (a, b), (m, b) -> (n, m)."""
        ctx.save_for_backward(x, w, y)
        return x @ w @ y.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of x, w and y."""
        x, w, y = ctx.saved_tensors
        return gradient @ y @ w.T, x.T @ gradient @ y, gradient.T @ x @ w


class InTheRegion(Bilinear):
    """The same. Its backward runs in the region that its forward ran in."""

    @staticmethod
    @precast.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        """(n, a), (a, b), (m, b) -> (n, m)."""
        return Bilinear.forward(ctx, x, w, y)

    @staticmethod
    @precast.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of x, w and y."""
        return Bilinear.backward(ctx, gradient)


class InFloat32(Bilinear):
    """The same, for a kernel of float32: a region casts its inputs, and is off inside."""

    @staticmethod
    @precast.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        """(n, a), (a, b), (m, b) -> (n, m)."""
        return Bilinear.forward(ctx, x, w, y)

    @staticmethod
    @precast.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of x, w and y."""
        return Bilinear.backward(ctx, gradient)


def output_and_gradients(
    function: type[Bilinear], inputs: list[Tensor], region: Region
) -> tuple[Tensor, list[Tensor]]:
    """What a function gives, and the gradients of its sum.

    Raises:
        RuntimeError: the function's backward met two dtypes.
    """
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    with region():
        output: Tensor = function.apply(*leaves)  # type: ignore[no-untyped-call]
    return output.detach(), list(torch.autograd.grad(output.sum(), leaves))


def error(found: list[Tensor], exact: list[Tensor]) -> float:
    """The largest difference beside the largest exact number."""
    worst = max((a.double() - b).abs().max().item() for a, b in zip(found, exact, strict=True))
    return worst / max(b.abs().max().item() for b in exact)


def main() -> None:
    """Prints what each function gives in float32 and in a region."""
    torch.manual_seed(0)
    inputs = [torch.randn(8, 16), torch.randn(16, 16), torch.randn(8, 16)]
    _, exact = output_and_gradients(Bilinear, [tensor.double() for tensor in inputs], plain)
    rows: list[tuple[object, ...]] = []
    messages = []
    for name, region in (("float32", plain), ("region", mixed)):
        for function in (Bilinear, InTheRegion, InFloat32):
            try:
                output, gradients = output_and_gradients(function, inputs, region)
                cells = (output.dtype, gradients[0].dtype, error(gradients, exact))
                rows.append((function.__name__, name, *cells))
            except RuntimeError as problem:
                rows.append((function.__name__, name, "bfloat16", "error", "-"))
                messages.append(str(problem))
    table(("function", "in", "output", "gradients", "error"), *rows)
    say(f"Bilinear, in a region: {', '.join(messages)}")
    say(
        "Autocast is off while backward runs, so what is written by hand there meets 16-bit "
        "gradients beside the float32 tensors that it saved. The decorators put it back on."
    )


if __name__ == "__main__":
    main()
