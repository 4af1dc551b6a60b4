"""The kernels of the float8 rules: which operands an operation multiplies, and when it runs in 16 bits after all.

Every operation of these rules is one product `x @ w.T`, of which `precast.weights.float8` knows the rest:

    linear(x, w, bias)         x @ w.T + bias
    mm(a, b), matmul(a, b)     a @ (b.T).T
    addmm(c, a, b)             beta c + alpha a @ (b.T).T

Invariants:

- `x` and what is added are rounded to the region's dtype first, which is the result's. The weight of `linear` is
  quantised from its own numbers; any other operand is rounded first;
- what cannot run in 8 bits runs in 16, as under the rule `lower`, and never raises an error for it;
- a watcher is told in which formats the operands ran, or why they ran in 16 bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from precast import _torch
from precast.engine.operation import Convert, Operation
from precast.engine.remarks import remark
from precast.engine.thread_state import Kernel, regions
from precast.errors import PolicyError, PrecastWarning
from precast.policy.policy import Rule
from precast.weights.float8 import formats
from precast.weights.float8.formats import Recipe
from precast.weights.float8.linear import linear, on_device
from precast.weights.float8.product import MULTIPLE
from precast.weights.float8.support import Support, Way, reason_impossible, support_of

__all__ = ["RECIPES", "check_device", "float8_kernel"]

RECIPES: Final = {
    Rule.FLOAT8: formats.BY_TENSOR,
    Rule.FLOAT8_POW2: formats.POWERS_OF_TWO,
    Rule.FLOAT8_ROWWISE: formats.BY_ROW,
    Rule.FLOAT8_HP_GRAD: formats.EXACT_WEIGHT_GRADIENT,
}


class _Product(NamedTuple):
    """What an operation multiplies and adds."""

    x: Any
    w: Any
    """Transposed where the operation has it the other way round, once it has been rounded."""
    is_weight: bool
    """Whether it is quantised from its own numbers, and not transposed."""
    added: Any = None
    alpha: float = 1
    beta: float = 1


def _of_linear(given: Mapping[str, Any]) -> _Product:
    return _Product(given["input"], given["weight"], True, given.get("bias"))


def _of_mm(given: Mapping[str, Any]) -> _Product:
    return _Product(given["self"], given["mat2"], False)


def _of_matmul(given: Mapping[str, Any]) -> _Product:
    return _Product(given["self"], given["other"], False)


def _of_addmm(given: Mapping[str, Any]) -> _Product:
    alpha, beta = given.get("alpha", 1), given.get("beta", 1)
    return _Product(given["mat1"], given["mat2"], False, given["self"], alpha, beta)


_PRODUCTS: Final[dict[str, Callable[[Mapping[str, Any]], _Product]]] = {
    "aten::addmm": _of_addmm,
    "aten::linear": _of_linear,
    "aten::matmul": _of_matmul,
    "aten::mm": _of_mm,
}


def float8_kernel(
    op: Operation, recipe: Recipe, in_16_bits: Kernel, lowers: Callable[[], Convert]
) -> Kernel:
    """The kernel of an operation with a float8 rule.

    Args:
        op: the operation.
        recipe: formats and scales.
        in_16_bits: its kernel under the rule `lower`.
        lowers: gives the conversion of that rule, for one call.
    """
    product_of = _PRODUCTS.get(op.name)
    if product_of is None:  # an overload that gives the result a dtype of its own
        return in_16_bits

    def run(keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = {**dict(zip(op.argument_names, args, strict=False)), **kwargs}
        product = product_of(given)
        obstacle = _obstacle(op, product)
        if obstacle is not None:
            result = in_16_bits(keyset, args, kwargs)
            remark(lambda: f"ran in 16 bits: {obstacle}")
            return result
        with op.without_autocast():
            return _computed(product, recipe, lowers())

    return run


def check_device(device_type: str, rule: Rule) -> None:
    """Warns once where a device type emulates the products.

    Raises:
        PolicyError: it has no float8 numbers.
    """
    reason = reason_impossible(device_type)
    if reason is not None:
        raise PolicyError(
            f"the rule '{rule}' cannot be followed on {device_type}: {reason}. Give this device type the rule 'lower'."
        )
    if not _torch.has_device(device_type) or device_type in _warned:
        return
    support = support_of(torch.device(device_type))
    if support.way is Way.EMULATED:
        _warned.add(device_type)
        warnings.warn(
            f"float8 is emulated on {device_type}, as {support.reason}: operands are rounded to 8 bits, and "
            "multiplied in float32. This shows what a model loses, and is slower than 16 bits.",
            PrecastWarning,
            stacklevel=2,
        )


_warned: Final[set[str]] = set()


def _obstacle(op: Operation, product: _Product) -> str | None:
    """Why an operation runs in 16 bits; None where it runs in 8."""
    x, w = product.x, product.w
    if _torch.is_functorch_active():
        return "torch.func transforms it"
    if _torch.in_forward_mode():
        return "its derivative may be taken forward"
    if _torch.is_tracing():
        return "torch.jit.trace records it"
    for tensor in (x, w):
        obstacle = _obstacle_of(op, tensor)
        if obstacle is not None:
            return obstacle
    if x.dim() < (1 if product.is_weight else 2) or w.dim() < 2:
        return "an operand is a vector"
    if w.dim() > 2:
        return "PyTorch has no float8 kernel for batches of matrices"
    if 0 in x.shape or 0 in w.shape:
        return "an operand has no numbers"
    if x.shape[-1] != w.shape[-1 if product.is_weight else 0]:
        return "the sizes of the operands do not fit"
    return None


def _obstacle_of(op: Operation, tensor: Any) -> str | None:
    if not op.eligible(tensor):
        what = f"{tensor.dtype} on {tensor.device.type}".removeprefix("torch.")
        return f"an operand is {what}"
    if tensor.layout is not torch.strided:
        return f"an operand's layout is {tensor.layout}"
    if hasattr(type(tensor), "__tensor_flatten__"):
        return f"an operand is a {type(tensor).__name__}"
    return None


def _computed(product: _Product, recipe: Recipe, lower: Convert) -> Tensor:
    x = lower(product.x)
    w = product.w if product.is_weight else lower(product.w).t()
    support = support_of(x.device)
    recipe = on_device(recipe, support.without_negative_zero)
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    held = None
    if product.is_weight and torch.is_autocast_cache_enabled():
        backward = torch.is_grad_enabled() and x.requires_grad
        held = regions.cache.quantised(w, recipe, backward=backward)
    result = linear(rows, w, recipe, support.way, held)
    if x.dim() != 2:
        result = result.reshape(*x.shape[:-1], w.shape[0])
    if product.alpha != 1:
        result = result * product.alpha
    if product.added is not None and product.beta != 0:
        added = lower(product.added)
        result = result + (added if product.beta == 1 else added * product.beta)
    remark(lambda: _said(recipe, support, rows, w, is_held=held is not None))
    return result


def _said(recipe: Recipe, support: Support, x: Tensor, w: Tensor, *, is_held: bool) -> str:
    how = "emulated in float32" if support.way is Way.EMULATED else "by the float8 kernel"
    weight = f"{recipe.weight}, held," if is_held else f"{recipe.weight},"
    said = f"{recipe.input} @ {weight} {how} ({support.reason})"
    odd = [str(size) for size in (x.shape[1], w.shape[0]) if size % MULTIPLE]
    if odd and support.way is Way.KERNEL:
        said += f"; padded with zeros, as {' and '.join(odd)} are no multiples of {MULTIPLE}"
    return said
