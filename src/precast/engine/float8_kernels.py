"""The kernels of the float8 rules: the operands of an operation, and the reasons to run it in 16 bits instead.

Every operation with such a rule is a product `x @ w.T`, which `precast.weights.float8` computes:

    linear(x, w, bias)         x @ w.T + bias
    mm(a, b), matmul(a, b)     a @ (b.T).T
    addmm(c, a, b)             beta c + alpha a @ (b.T).T

Invariants:

- all operands but the weight of `linear` are rounded to the region's dtype, which is that of the result, before they
  are quantised;
- an operation that cannot run in 8 bits runs in 16, as with the rule `lower`, without an error;
- a watcher gets the formats of the operands, or the reason for 16 bits, as an annotation.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from precast import _torch
from precast.engine.entry_point import annotate
from precast.engine.operation import Convert, Operation
from precast.engine.product_kernels import ADDED, FACTORS
from precast.engine.thread_state import Kernel, regions
from precast.errors import PolicyError, PrecastWarning
from precast.policy.policy import Rule
from precast.weights.float8 import formats
from precast.weights.float8.formats import Recipe
from precast.weights.float8.linear import linear, recipe_for_device
from precast.weights.float8.product import MULTIPLE
from precast.weights.float8.support import ProductMethod, Support, reason_unsupported, support_of

__all__ = ["RECIPES", "check_device", "float8_kernel"]

RECIPES: Final = {
    Rule.FLOAT8: formats.BY_TENSOR,
    Rule.FLOAT8_POW2: formats.POWERS_OF_TWO,
    Rule.FLOAT8_ROWWISE: formats.BY_ROW,
    Rule.FLOAT8_HP_GRAD: formats.EXACT_WEIGHT_GRADIENT,
}


class _Float8Operands(NamedTuple):
    """The operands of an operation."""

    x: Any
    w: Any
    """The second factor as the operation gets it: `(n, k)` for `linear`, else `(k, n)`."""
    is_weight: bool
    """True if `w` is the weight of `linear`, which is neither rounded before it is quantised nor transposed."""
    added: Any
    alpha: float
    beta: float


_OPERATIONS: Final = ("aten::addmm", "aten::linear", "aten::matmul", "aten::mm")


def _operands(operation: str, arguments: Mapping[str, Any]) -> _Float8Operands:
    x, w = (arguments[name] for name in FACTORS[operation])
    added = arguments.get(ADDED.get(operation, "bias"))
    alpha, beta = arguments.get("alpha", 1), arguments.get("beta", 1)
    return _Float8Operands(x, w, operation == "aten::linear", added, alpha, beta)


def float8_kernel(
    op: Operation, recipe: Recipe, kernel_in_16_bits: Kernel, get_cast: Callable[[], Convert]
) -> Kernel:
    """Return the kernel of an operation with a float8 rule.

    `kernel_in_16_bits` is its kernel with the rule `lower`. `get_cast()` returns the cast of that rule for one call.
    """
    if op.name not in _OPERATIONS:  # an overload with an explicit result dtype
        return kernel_in_16_bits

    def run(keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments = {**dict(zip(op.argument_names, args, strict=False)), **kwargs}
        product = _operands(op.name, arguments)
        obstacle = _obstacle(op, product)
        if obstacle is not None:
            result = kernel_in_16_bits(keyset, args, kwargs)
            annotate(lambda: f"ran in 16 bits: {obstacle}")
            return result
        with op.without_autocast():
            return _compute(product, recipe, get_cast())

    return run


def check_device(device_type: str, rule: Rule) -> None:
    """Warn once if float8 products are emulated on a device type.

    Raises:
        PolicyError: the device type has no float8 dtypes.
    """
    reason = reason_unsupported(device_type)
    if reason is not None:
        raise PolicyError(
            f"the rule '{rule}' is not supported on {device_type}: {reason}. Use the rule 'lower' on this device type."
        )
    if not _torch.has_device(device_type) or device_type in _warned:
        return
    support = support_of(torch.device(device_type))
    if support.method is ProductMethod.EMULATED:
        _warned.add(device_type)
        warnings.warn(
            f"float8 is emulated on {device_type}, as {support.reason}: operands are rounded to 8 bits, and "
            "multiplied in float32. This shows what a model loses, and is slower than 16 bits.",
            PrecastWarning,
            stacklevel=2,
        )


_warned: Final[set[str]] = set()


def _obstacle(op: Operation, product: _Float8Operands) -> str | None:
    x, w = product.x, product.w
    if _torch.is_functorch_active():
        return "torch.func transforms it"
    if _torch.in_forward_mode():
        return "forward-mode differentiation is active"
    if _torch.is_tracing():
        return "torch.jit.trace records it"
    for tensor in (x, w):
        obstacle = _obstacle_in(op, tensor)
        if obstacle is not None:
            return obstacle
    if x.dim() < (1 if product.is_weight else 2) or w.dim() < 2:
        return "an operand is a vector"
    if w.dim() > 2:
        return "PyTorch has no float8 kernel for batches of matrices"
    if 0 in x.shape or 0 in w.shape:
        return "an operand is empty"
    if x.shape[-1] != w.shape[-1 if product.is_weight else 0]:
        return "the sizes of the operands do not match"
    return None


def _obstacle_in(op: Operation, tensor: Any) -> str | None:
    if not op.eligible(tensor):
        kind = f"{tensor.dtype} on {tensor.device.type}".removeprefix("torch.")
        return f"an operand is {kind}"
    if tensor.layout is not torch.strided:
        return f"an operand's layout is {tensor.layout}"
    if hasattr(type(tensor), "__tensor_flatten__"):
        return f"an operand is a {type(tensor).__name__}"
    return None


def _compute(product: _Float8Operands, recipe: Recipe, lower: Convert) -> Tensor:
    x = lower(product.x)
    w = product.w if product.is_weight else lower(product.w).t()
    support = support_of(x.device)
    recipe = recipe_for_device(recipe, support.without_negative_zero)
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    held_weight = None
    if product.is_weight and torch.is_autocast_cache_enabled():
        backward = torch.is_grad_enabled() and x.requires_grad
        held_weight = regions.cache.quantised(w, recipe, backward=backward)
    result = linear(rows, w, recipe, support.method, held_weight)
    if x.dim() != 2:
        result = result.reshape(*x.shape[:-1], w.shape[0])
    if product.alpha != 1:
        result = result * product.alpha
    if product.added is not None and product.beta != 0:
        added = lower(product.added)
        result = result + (added if product.beta == 1 else added * product.beta)
    annotate(lambda: _description(recipe, support, rows, w, is_held=held_weight is not None))
    return result


def _description(recipe: Recipe, support: Support, x: Tensor, w: Tensor, *, is_held: bool) -> str:
    implementation = (
        "emulated in float32"
        if support.method is ProductMethod.EMULATED
        else "by the float8 kernel"
    )
    weight = f"{recipe.weight}, held," if is_held else f"{recipe.weight},"
    text = f"{recipe.input} @ {weight} {implementation} ({support.reason})"
    padded = [str(size) for size in (x.shape[1], w.shape[0]) if size % MULTIPLE]
    if padded and support.method is ProductMethod.KERNEL:
        text += f"; padded with zeros, as {' and '.join(padded)} are not multiples of {MULTIPLE}"
    return text
