"""The product `x @ w.T` in 8 bits with its gradients. Every operation with a float8 rule uses it.

For `x` (m, k), `w` (n, k) and the gradient `g` (m, n) of the result; q quantises an operand as the `Recipe` defines:

    result      q(x) @ q(w).T
    grad of x   q(g) @ q(w)
    grad of w   q(g).T @ q(x), or g.T @ x in 16 bits

Invariants:

- all three results have the 16-bit dtype of `x`; autograd converts the gradient of a float32 `w` to float32;
- if backward needs an operand with the same scales as forward, it is saved in 8 bits. If the scales differ, the operand
  itself is saved and quantised in backward;
- a second derivative raises an error with the rule and the weight, because rounding to 8 bits has no derivative;
- autocast is off inside, also in a backward pass that runs within a region.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from precast import _torch
from precast.errors import BannedOperationError
from precast.weights.float8.formats import Recipe, Scaling
from precast.weights.float8.product import multiply
from precast.weights.float8.quantise import Quantised, quantise
from precast.weights.float8.support import ProductMethod

__all__ = ["QuantisedWeight", "linear", "recipe_for_device"]


class QuantisedWeight(NamedTuple):
    """A weight that is already quantised.

    Attributes:
        forward: the operand of `x @ w.T`.
        backward: the operand of `g @ w`; None if the gradient of `x` is not needed.
        on_gradient: called after the gradient of the weight has been computed.
    """

    forward: Quantised
    backward: Quantised | None
    on_gradient: Callable[[], None]


def linear(
    x: Tensor, w: Tensor, recipe: Recipe, method: ProductMethod, held: QuantisedWeight | None = None
) -> Tensor:
    """Return `x @ w.T`, computed in 8 bits.

    Args:
        x: `(m, k)`, in the dtype of the result.
        w: `(n, k)`, in any floating dtype.
        recipe: formats and scales.
        method: the float8 kernel, or its emulation.
        held: `w` in 8 bits, if an attachment holds it.
    """
    if torch.is_grad_enabled() and (x.requires_grad or w.requires_grad):
        result: Tensor
        result, _ = _ProductFunction.apply(x, w, _ProductOptions(recipe, method, held))  # type: ignore[no-untyped-call]
        return result
    weight = quantise(w, recipe.weight) if held is None else held.forward
    return multiply(quantise(x, recipe.input), weight.t(), x.dtype, method, fast=True)


def recipe_for_device(recipe: Recipe, without_negative_zero: bool) -> Recipe:
    """Return the recipe with the device's formats, with or without negative zero."""
    if recipe.without_negative_zero is without_negative_zero:
        return recipe
    return replace(recipe, without_negative_zero=without_negative_zero)


class _ProductOptions(NamedTuple):
    """The arguments of `linear` other than the operands."""

    recipe: Recipe
    method: ProductMethod
    held: QuantisedWeight | None


class _ProductFunction(torch.autograd.Function):
    """The 8-bit product as one node of the autograd graph.

    The second result is empty. Gradients are connected by it to both operands, which may not exist any more.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, options: _ProductOptions) -> tuple[Tensor, Tensor]:
        recipe, method, held = options
        ctx.recipe, ctx.method, ctx.weight = recipe, method, weakref.ref(w)
        ctx.on_gradient = None if held is None else held.on_gradient
        input_ = quantise(x, recipe.input)
        weight = quantise(w, recipe.weight) if held is None else held.forward
        saved_weight = weight if recipe.weight_for_input == recipe.weight else None
        if saved_weight is None and held is not None:
            saved_weight = held.backward
        saved_input = input_ if recipe.input_for_weight == recipe.input else None
        if recipe.exact_weight_gradient:
            saved_input = None
        needs_x, needs_w = ctx.needs_input_grad[:2]
        anchor = x.new_empty(0)
        ctx.save_for_backward(
            *(_saved_tensors(x, saved_input) if needs_w else (None, None)),
            *(_saved_tensors(w, saved_weight) if needs_x else (None, None)),
            anchor,
        )
        return multiply(input_, weight.t(), x.dtype, method, fast=True), anchor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, inverse_x, w, inverse_w, anchor = ctx.saved_tensors
        with torch.no_grad(), _torch.AutocastOff(gradient.device.type)():
            grad_x = _grad_of_x(ctx, gradient, w, inverse_w) if ctx.needs_input_grad[0] else None
            grad_w = _grad_of_w(ctx, gradient, x, inverse_x) if ctx.needs_input_grad[1] else None
        if grad_w is not None and ctx.on_gradient is not None:
            ctx.on_gradient()
        if torch.is_grad_enabled():  # the caller may differentiate the gradients
            sources = gradient, anchor, ctx.recipe.rule, ctx.weight
            grad_x, grad_w = (
                None if each is None else _Underivable.apply(each, *sources)  # type: ignore[no-untyped-call]
                for each in (grad_x, grad_w)
            )
        return grad_x, grad_w, None


class _Underivable(torch.autograd.Function):
    """A gradient that was computed in 8 bits: it depends on the operands and on a gradient, but has no derivative."""

    @staticmethod
    def forward(
        ctx: Any, gradient: Tensor, _above: Tensor, _anchor: Tensor, rule: str, weight: Any
    ) -> Tensor:
        ctx.rule, ctx.weight = rule, weight
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Tensor:
        raise BannedOperationError(
            f"a second derivative of {_description(ctx.weight())} was requested, and its rule is '{ctx.rule}': "
            "rounding to 8 bits has no derivative. Give the module the rule 'lower' or 'fp32' in the policy."
        )


def _description(weight: Tensor | None) -> str:
    """Return the name of a weight in the outermost module that has it; its shape if there is none."""
    if weight is None:
        return "a product"
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    names = [
        (name, type(module).__name__)
        for module in modules
        for name, parameter in module.named_parameters()
        if parameter is weight
    ]
    if not names:
        return f"a product with an operand of shape {tuple(weight.shape)}"
    name, kind = max(names, key=lambda each: len(each[0]))
    return f"the product with {name!r} of {kind}"


def _saved_tensors(operand: Tensor, quantised: Quantised | None) -> tuple[Tensor, Tensor | None]:
    """Return an operand as saved for backward: in 8 bits with its inverse scale, or unchanged with None."""
    return (operand, None) if quantised is None else quantised


def _operand(saved: Tensor, inverse: Tensor | None, scaling: Scaling) -> Quantised:
    return quantise(saved, scaling) if inverse is None else Quantised(saved, inverse)


def _grad_of_x(ctx: Any, gradient: Tensor, w: Tensor, inverse: Tensor | None) -> Tensor:
    recipe = ctx.recipe
    weight = _operand(w, inverse, recipe.weight_for_input)
    quantised_gradient = quantise(gradient, recipe.gradient_for_input)
    return multiply(quantised_gradient, weight, gradient.dtype, ctx.method, fast=False)


def _grad_of_w(ctx: Any, gradient: Tensor, x: Tensor, inverse: Tensor | None) -> Tensor:
    recipe = ctx.recipe
    if recipe.exact_weight_gradient:
        return gradient.t() @ x
    input_ = _operand(x, inverse, recipe.input_for_weight)
    quantised_gradient = quantise(gradient, recipe.gradient_for_weight)
    return multiply(quantised_gradient.t(), input_, gradient.dtype, ctx.method, fast=False)
