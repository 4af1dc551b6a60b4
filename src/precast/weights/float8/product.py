"""The product of two float8 matrices: by PyTorch's kernel, or emulated on devices without one.

Invariants:

- the emulation is exactly defined: the product of the 8-bit matrices in float32, multiplied by the product of the
  inverse scales in float32, rounded to the result's dtype. 8-bit values are exact in float32, TF32 and bfloat16, so
  `torch.set_float32_matmul_precision` has no effect on the operands;
- the kernel needs sizes that are multiples of 16: matrices are padded with zeros, which do not change the sums.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from precast import _torch
from precast.weights.float8.quantise import Quantised
from precast.weights.float8.support import ProductMethod

__all__ = ["MULTIPLE", "multiply"]

MULTIPLE: Final = 16
"""The inner size and the number of result columns of the kernel are multiples of this."""


def multiply(
    a: Quantised, b: Quantised, dtype: torch.dtype, method: ProductMethod, *, fast: bool
) -> Tensor:
    """Return `a @ b`, rounded to `dtype`.

    Args:
        a: `(m, k)`, with one scale, or one per row.
        b: `(k, n)`, with one scale, or one per column.
        dtype: `float16` or `bfloat16`.
        method: the kernel, or its emulation.
        fast: allow the kernel to accumulate in fewer bits than float32. The emulation never does.
    """
    if method is ProductMethod.EMULATED:
        return _emulated(a, b).to(dtype)
    return _by_kernel(a, b, dtype, fast=fast)


def _emulated(a: Quantised, b: Quantised) -> Tensor:
    return (a.data.float() @ b.data.float()) * (a.inverse * b.inverse)


def _by_kernel(a: Quantised, b: Quantised, dtype: torch.dtype, *, fast: bool) -> Tensor:
    """Call the kernel as torchao does: with row scales, in the fast mode only where a less exact sum is allowed."""
    columns = b.data.shape[1]
    padded_a = _padded(a.data, rows=False).contiguous()
    padded_b = _padded(b.data.t(), rows=True).contiguous().t()
    by_row = bool(a.inverse.dim() or b.inverse.dim())
    if not by_row:
        out = _torch.scaled_mm(
            padded_a, padded_b, a.inverse, b.inverse, dtype, by_row=False, fast=fast
        )
        return out[:, :columns]
    inverse_a, inverse_b = a.inverse, b.inverse
    if not (fast and inverse_a.dim() and inverse_b.dim()):
        one = inverse_a.new_ones(())
        out = _torch.scaled_mm(
            padded_a, padded_b, one, one, torch.bfloat16, by_row=False, fast=fast
        )
        return (out[:, :columns] * (inverse_a * inverse_b)).to(dtype)
    missing = padded_b.shape[1] - columns
    inverse_b = functional.pad(inverse_b, (0, missing), value=1.0) if missing else inverse_b
    # With row scales the kernel has bfloat16 results only.
    out = _torch.scaled_mm(
        padded_a,
        padded_b,
        inverse_a.contiguous(),
        inverse_b.contiguous(),
        torch.bfloat16,
        by_row=True,
        fast=True,
    )
    return out[:, :columns].to(dtype)


def _padded(data: Tensor, *, rows: bool) -> Tensor:
    """Pad a matrix with zeros, so that its columns (and its rows, if `rows`) are multiples of 16."""
    right = -data.shape[1] % MULTIPLE
    below = -data.shape[0] % MULTIPLE if rows else 0
    if not (right or below):
        return data
    bits = functional.pad(data.view(torch.uint8), (0, right, 0, below))
    return bits.view(data.dtype)
