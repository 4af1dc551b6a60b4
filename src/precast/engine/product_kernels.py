"""The kernels of the rule `lower_out_fp32`: products of 16-bit factors, added up and returned in float32.

Factors are rounded to the region's dtype, as with the rule `lower`. A bias is added in float32 and not rounded.

Invariants:

- products of two 16-bit numbers are exact in float32, so results differ by the order of the additions alone, whether
  the device has a kernel with a float32 result or the rounded factors are multiplied in float32;
- the gradient of the result is rounded to 16 bits once, and the gradients of the factors are products of 16-bit
  numbers, added up in float32. Under `torch.func`, in forward mode and in an exported graph it is not rounded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from precast import _torch
from precast.engine.operation import Convert, Operation
from precast.engine.thread_state import Kernel
from precast.policy.policy import Rule
from precast.policy.rows import PRODUCT_OPERATIONS, RESULT_DTYPE_OVERLOADS, split

__all__ = ["ADDED", "FACTORS", "is_product_in_float32", "product_kernel"]

_F32: Final = torch.float32
ADDED: Final = {"aten::addmm": "self", "aten::baddbmm": "self"}
"""The argument that is added to the product; that of all other operations is called `bias`."""
FACTORS: Final = {
    "aten::addmm": ("mat1", "mat2"),
    "aten::baddbmm": ("batch1", "batch2"),
    "aten::bmm": ("self", "mat2"),
    "aten::linear": ("input", "weight"),
    "aten::matmul": ("self", "other"),
    "aten::mm": ("self", "mat2"),
}
"""The factors of the operations that PyTorch's kernels with a float32 result can compute."""


def product_kernel(op: Operation, in_16_bits: Kernel, lowers: Callable[[], Convert]) -> Kernel:
    """Return the kernel of an operation with the rule `lower_out_fp32`.

    `in_16_bits` is its kernel with the rule `lower`, for an overload that is told the dtype of its result, and `lowers`
    returns the cast of that rule for one call.
    """
    operation, overload = split(op.name)
    if overload in RESULT_DTYPE_OVERLOADS:
        return in_16_bits
    assert operation in PRODUCT_OPERATIONS[Rule.LOWER_OUT_FP32], op.name
    added, in_float32 = ADDED.get(operation, "bias"), is_product_in_float32(op)

    def run(_keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments = {**dict(zip(op.argument_names, args, strict=False)), **kwargs}
        lower = lowers()
        # From last to first, as the rule `lower` does.
        rounded = {
            name: _widened(arguments[name]) if name == added else lower(arguments[name])
            for name in reversed(arguments)
            if op.eligible(arguments[name])
        }
        arguments |= rounded
        if not in_float32:
            with op.without_autocast():
                result = _by_kernel(operation, added, arguments)
            if result is not None:
                return result
        arguments |= {name: _widened(value) for name, value in rounded.items()}
        names = op.argument_names[: len(args)]
        result = op.call(
            tuple(arguments[name] for name in names), {name: arguments[name] for name in kwargs}
        )
        return _with_rounded_gradient(result, op.lower_dtype())

    return run


def is_product_in_float32(op: Operation) -> bool:
    """Return True if no kernel of PyTorch's can compute the operation: rounded factors are multiplied in float32."""
    operation, overload = split(op.name)
    has_kernels = op.device_type == "cuda" and operation in FACTORS and _has_kernels()
    return overload not in RESULT_DTYPE_OVERLOADS and not has_kernels


def _widened(tensor: Tensor) -> Tensor:
    # The dtype is not compared first: a weight of a converted model shows another one than it has.
    return _torch.cast_without_torch_function(tensor, _F32)


def _by_kernel(operation: str, added: str, arguments: dict[str, Any]) -> Tensor | None:
    """Return the result by PyTorch's kernel for 16-bit factors and a float32 result; None where there is none."""
    names = FACTORS.get(operation)
    if names is None:
        return None
    a, b = (arguments[name] for name in names)
    if operation == "aten::linear":
        b = b.t() if b.dim() == 2 else b
    if not _can_use_kernel(a, b):
        return None
    rows = a.reshape(-1, a.shape[-1]) if b.dim() == 2 else a
    result: Tensor = _Product.apply(rows, b)  # type: ignore[no-untyped-call]
    if a.dim() != b.dim():
        result = result.reshape(*a.shape[:-1], b.shape[-1])
    if arguments.get("alpha", 1) != 1:
        result = result * arguments["alpha"]
    beta, other = arguments.get("beta", 1), arguments.get(added)
    if other is not None and beta != 0:
        result = result + (other if beta == 1 else other * beta)
        result = _with_rounded_gradient(result, a.dtype)  # of the added argument, too
    return result


@functools.cache
def _has_kernels() -> bool:
    """Return True if PyTorch multiplies 16-bit matrices with a float32 result: builds for CUDA do (2.11)."""
    overloads = torch.ops.aten.mm.dtype, torch.ops.aten.bmm.dtype
    return torch.version.hip is None and all(_torch.has_kernel(each, "CUDA") for each in overloads)


def _can_use_kernel(a: Tensor, b: Tensor) -> bool:
    """Return True if two factors are matrices, or as many in each, of the same 16-bit dtype on a CUDA device."""
    fits = (
        a.dim() == 3 and a.shape[0] == b.shape[0] if b.dim() == 3 else a.dim() > 1 and b.dim() == 2
    )
    return (
        fits
        and a.device.type == b.device.type == "cuda"
        and a.dtype is b.dtype
        and a.dtype in _torch.SIXTEEN_BIT
        and a.layout is b.layout is torch.strided
        and a.shape[-1] == b.shape[-2]
        and 0 not in (*a.shape, *b.shape)
        and not _is_transformed()
    )


def _is_transformed() -> bool:
    return not _torch.is_real() or _torch.in_forward_mode()


def _with_rounded_gradient(result: Any, dtype: torch.dtype) -> Any:
    """Return a product whose gradient is rounded to a dtype before it reaches the factors."""
    if isinstance(result, Tensor) and result.requires_grad and not _is_transformed():
        return _RoundedGradient.apply(result, dtype)  # type: ignore[no-untyped-call]
    return result


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    return (torch.mm if b.dim() == 2 else torch.bmm)(a, b, out_dtype=_F32)


class _Product(torch.autograd.Function):
    """The product of two 16-bit matrices, or of as many in two batches, with a float32 result.

    PyTorch's overloads with a result dtype have no derivative (2.13).
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return _multiply(a, b)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        needs_a, needs_b = ctx.needs_input_grad
        with _torch.AutocastOff(gradient.device.type)():
            rounded = gradient.to(a.dtype)
            return (rounded @ b.mT if needs_a else None, a.mT @ rounded if needs_b else None)


class _RoundedGradient(torch.autograd.Function):
    """A tensor with a gradient that is rounded to 16 bits."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return result.detach()  # no view, which could not be written in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype).to(gradient.dtype), None
