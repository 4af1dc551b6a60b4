"""`x @ w.T` in 8 bits, with its gradients: the product that each operation with a float8 rule is made of.

For `x` (m, k), `w` (n, k) and the gradient `g` (m, n) of the result, with q the operand in 8 bits (`Recipe` says how):

    result      q(x) @ q(w).T
    grad of x   q(g) @ q(w)
    grad of w   q(g).T @ q(x), or g.T @ x in 16 bits

Invariants:

- all three are rounded to the dtype of `x`, a 16-bit one; autograd makes the gradient of a float32 `w` float32;
- what backward needs in the form that forward has made is kept in 8 bits. Where backward scales by another dimension,
  the operand itself is kept, and quantised in backward;
- a gradient of a gradient raises an error, as rounding to 8 bits has no useful derivative;
- autocast is off in it, also in a backward pass that runs inside a region.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from precast import _torch
from precast.weights.float8.formats import Recipe
from precast.weights.float8.product import multiply
from precast.weights.float8.quantise import Quantised, quantise
from precast.weights.float8.support import Way

__all__ = ["QuantisedWeight", "linear", "on_device"]


class QuantisedWeight(NamedTuple):
    """A weight that is in 8 bits already, so that it is not quantised again.

    Attributes:
        forward: for `x @ w.T`.
        backward: for `g @ w`; None where nobody asks for that gradient.
        received: called when the weight has got a gradient.
    """

    forward: Quantised
    backward: Quantised | None
    received: Callable[[], None]


def linear(
    x: Tensor, w: Tensor, recipe: Recipe, way: Way, held: QuantisedWeight | None = None
) -> Tensor:
    """`x @ w.T` in 8 bits.

    Args:
        x: `(m, k)`, in the dtype that the result is to have.
        w: `(n, k)`, in any floating dtype.
        recipe: formats and scales.
        way: by the kernel, or emulated.
        held: `w` in 8 bits, where that is kept.
    """
    if torch.is_grad_enabled() and (x.requires_grad or w.requires_grad):
        result: Tensor = _Linear.apply(x, w, _How(recipe, way, held))  # type: ignore[no-untyped-call]
        return result
    weight = quantise(w, recipe.weight) if held is None else held.forward
    return multiply(quantise(x, recipe.input), weight.t(), x.dtype, way, fast=True)


def on_device(recipe: Recipe, without_negative_zero: bool) -> Recipe:
    """The recipe in the formats of a device."""
    if recipe.without_negative_zero is without_negative_zero:
        return recipe
    return Recipe(
        recipe.by_row,
        recipe.powers_of_two,
        recipe.gradient,
        recipe.exact_weight_gradient,
        without_negative_zero,
    )


class _How(NamedTuple):
    """What `linear` is given beside the operands."""

    recipe: Recipe
    way: Way
    held: QuantisedWeight | None


class _Linear(torch.autograd.Function):
    """The product as one node of the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, how: _How) -> Tensor:
        recipe, way, held = how
        ctx.recipe, ctx.way = recipe, way
        ctx.received = None if held is None else held.received
        input_ = quantise(x, recipe.input)
        weight = quantise(w, recipe.weight) if held is None else held.forward
        kept_weight = weight if recipe.weight_for_input == recipe.weight else None
        if kept_weight is None and held is not None:
            kept_weight = held.backward
        kept_input = input_ if recipe.input_for_weight == recipe.input else None
        if recipe.exact_weight_gradient:
            kept_input = None
        needs_x, needs_w = ctx.needs_input_grad[:2]
        ctx.save_for_backward(
            *(_kept(x, kept_input) if needs_w else (None, None)),
            *(_kept(w, kept_weight) if needs_x else (None, None)),
        )
        return multiply(input_, weight.t(), x.dtype, way, fast=True)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, inverse_x, w, inverse_w = ctx.saved_tensors
        with _torch.AutocastOff(gradient.device.type)():
            grad_x = _grad_of_x(ctx, gradient, w, inverse_w) if ctx.needs_input_grad[0] else None
            grad_w = _grad_of_w(ctx, gradient, x, inverse_x) if ctx.needs_input_grad[1] else None
        if grad_w is not None and ctx.received is not None:
            ctx.received()
        return grad_x, grad_w, None


def _kept(operand: Tensor, quantised: Quantised | None) -> tuple[Tensor, Tensor | None]:
    """What backward gets of an operand: its 8-bit form, or itself."""
    return (operand, None) if quantised is None else quantised


def _form(kept: Tensor, inverse: Tensor | None, scaling: Any) -> Quantised:
    return quantise(kept, scaling) if inverse is None else Quantised(kept, inverse)


def _grad_of_x(ctx: Any, gradient: Tensor, w: Tensor, inverse: Tensor | None) -> Tensor:
    recipe = ctx.recipe
    weight = _form(w, inverse, recipe.weight_for_input)
    above = quantise(gradient, recipe.gradient_for_input)
    return multiply(above, weight, gradient.dtype, ctx.way, fast=False)


def _grad_of_w(ctx: Any, gradient: Tensor, x: Tensor, inverse: Tensor | None) -> Tensor:
    recipe = ctx.recipe
    if recipe.exact_weight_gradient:
        return gradient.t() @ x
    input_ = _form(x, inverse, recipe.input_for_weight)
    above = quantise(gradient, recipe.gradient_for_weight)
    return multiply(above.t(), input_, gradient.dtype, ctx.way, fast=False)
