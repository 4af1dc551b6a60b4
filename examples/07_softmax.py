"""Softmax and cross-entropy, naive and stable: values and gradients beside float64, in each format."""

from __future__ import annotations

from collections.abc import Callable

import torch
from showing import say, table
from torch import Tensor
from torch.nn import functional as F

import precast

FORMATS = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn)
Keep = Callable[[Tensor], Tensor]
"""What each operation's result goes through."""


class _Stored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype  # type: ignore[attr-defined]
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype).to(gradient.dtype), None  # type: ignore[attr-defined]


def kept_in(dtype: torch.dtype) -> Keep:
    """Rounds a result to `dtype`, and its gradient on the way back: as if every operation stored it so."""
    return lambda x: _Stored.apply(x, dtype)  # type: ignore[no-untyped-call]


def exactly(x: Tensor) -> Tensor:
    """Nothing is rounded."""
    return x


def naive_softmax(x: Tensor, keep: Keep) -> Tensor:
    """exp(x) over its sum."""
    e = keep(x.exp())
    return keep(e / keep(e.sum()))


def stable_softmax(x: Tensor, keep: Keep) -> Tensor:
    """The same with the largest taken off, which changes nothing but the range of exp."""
    return naive_softmax(keep(x - x.max()), keep)


def naive_cross_entropy(x: Tensor, keep: Keep) -> Tensor:
    """Minus the logarithm of the first class's softmax."""
    return -keep(naive_softmax(x, keep)[0].log())


def stable_cross_entropy(x: Tensor, keep: Keep) -> Tensor:
    """log(sum(exp(x))) - x of the first class: no logarithm of a tiny number."""
    shifted = keep(x - x.max())
    return keep(keep(keep(shifted.exp()).sum()).log() - shifted[0])


def value_and_gradient(
    function: Callable[[Tensor, Keep], Tensor], logits: Tensor, keep: Keep
) -> tuple[Tensor, Tensor]:
    """A function of the logits, and the gradient of its first element with respect to them."""
    x = logits.clone().requires_grad_()
    y = function(keep(x), keep)
    (gradient,) = torch.autograd.grad(y.reshape(-1)[0], x)
    return y.detach(), gradient


def errors(
    function: Callable[[Tensor, Keep], Tensor], logits: Tensor, dtype: torch.dtype
) -> tuple[float, float]:
    """How far value and gradient in `dtype` are from float64 of the logits that `dtype` can hold."""
    held = logits.to(dtype).double()
    exact = value_and_gradient(
        function if function in STABLE else STABLE_OF[function], held, exactly
    )
    found = value_and_gradient(function, held, kept_in(dtype))
    value, gradient = ((a - b).abs().max().item() for a, b in zip(found, exact, strict=True))
    return value, gradient


STABLE_OF: dict[Callable[[Tensor, Keep], Tensor], Callable[[Tensor, Keep], Tensor]] = {
    naive_softmax: stable_softmax,
    naive_cross_entropy: stable_cross_entropy,
}
STABLE = tuple(STABLE_OF.values())


def in_a_region(logits: Tensor, dtype: torch.dtype) -> dict[str, tuple[torch.dtype, float]]:
    """PyTorch's own functions inside a region, on logits of `dtype`: dtype of the result, and its error."""
    held, target = logits.to(dtype)[None], torch.tensor([0])
    exact = {
        "F.softmax": F.softmax(held.double(), -1),
        "F.cross_entropy": F.cross_entropy(held.double(), target),
    }
    with precast.autocast("cpu", dtype=dtype):
        found = {"F.softmax": F.softmax(held, -1), "F.cross_entropy": F.cross_entropy(held, target)}
    return {
        name: (y.dtype, (y.double() - exact[name]).abs().max().item()) for name, y in found.items()
    }


def main() -> None:
    """Prints errors for logits that are harmless, large, and far apart."""
    harmless = torch.tensor([0.5, 1.0, -1.5])
    for logits in (harmless, torch.tensor([100.0, 96.0, 104.0]), torch.tensor([-96.0, 16.0, 8.0])):
        rows = [
            (f"{function.__name__.replace('_', ' ')}, {what}", *(f"{e:.1g}" for e in found))
            for function in (function for pair in STABLE_OF.items() for function in pair)
            for what, found in zip(
                ("value", "gradient"),
                zip(*(errors(function, logits, dtype) for dtype in FORMATS), strict=True),
                strict=True,
            )
        ]
        print("logits", logits.tolist())
        table(("error beside float64", "f32", "f16", "bf16", "f8 e5m2", "f8 e4m3"), *rows)
    policy = precast.Policy.load("default")
    rules = {"F.softmax": "softmax.int", "F.cross_entropy": "nll_loss"}
    cells = [
        (name, dtype, result, error, policy.resolve(rules[name], "cuda").rule.value)
        for dtype in (torch.float16, torch.bfloat16)
        for name, (result, error) in in_a_region(harmless, dtype).items()
    ]
    table(("in a region", "of", "gives on the CPU", "error", "rule on CUDA"), *cells)
    say("PyTorch's own functions are the stable ones; a region keeps losses in float32.")


if __name__ == "__main__":
    main()
