"""The product of two float8 matrices: by PyTorch's kernel, or emulated where the device has none.

Invariants:

- the emulation is defined in bits: the product of the 8-bit numbers in float32, times the product of the scales in
  float32, rounded to the result's dtype. The 8-bit numbers are exact in float32, TF32 and bfloat16, so
  `torch.set_float32_matmul_precision` does not change them;
- the kernel gets matrices whose sizes are multiples of 16, padded with zeros if need be, which add nothing.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from precast import _torch
from precast.weights.float8.quantise import Quantised
from precast.weights.float8.support import Way

__all__ = ["MULTIPLE", "multiply"]

MULTIPLE: Final = 16
"""Of what the kernel's inner size and the columns of its result are multiples."""


def multiply(a: Quantised, b: Quantised, dtype: torch.dtype, way: Way, *, fast: bool) -> Tensor:
    """`a @ b`, rounded to `dtype`.

    Args:
        a: `(m, k)`, with one scale or one for each row.
        b: `(k, n)`, with one scale or one for each column.
        dtype: `float16` or `bfloat16`.
        way: by the kernel, or emulated.
        fast: whether the kernel may keep its sum in fewer bits; the emulation never does.
    """
    if way is Way.EMULATED:
        return _emulated(a, b).to(dtype)
    return _by_kernel(a, b, dtype, fast=fast)


def _emulated(a: Quantised, b: Quantised) -> Tensor:
    return (a.data.float() @ b.data.float()) * (a.inverse * b.inverse)


def _by_kernel(a: Quantised, b: Quantised, dtype: torch.dtype, *, fast: bool) -> Tensor:
    """As torchao calls the kernel: with scales for rows it is fast only where its sum may be inexact."""
    columns = b.data.shape[1]
    left = _padded(a.data, rows=False).contiguous()
    right = _padded(b.data.t(), rows=True).contiguous().t()
    by_row = bool(a.inverse.dim() or b.inverse.dim())
    if not by_row:
        out = _torch.scaled_mm(left, right, a.inverse, b.inverse, dtype, by_row=False, fast=fast)
        return out[:, :columns]
    inverse_a, inverse_b = a.inverse, b.inverse
    if not (fast and inverse_a.dim() and inverse_b.dim()):
        one = inverse_a.new_ones(())
        out = _torch.scaled_mm(left, right, one, one, torch.bfloat16, by_row=False, fast=fast)
        return (out[:, :columns] * (inverse_a * inverse_b)).to(dtype)
    missing = right.shape[1] - columns
    inverse_b = functional.pad(inverse_b, (0, missing), value=1.0) if missing else inverse_b
    # For scales of rows the kernel knows no other dtype of the result.
    out = _torch.scaled_mm(
        left,
        right,
        inverse_a.contiguous(),
        inverse_b.contiguous(),
        torch.bfloat16,
        by_row=True,
        fast=True,
    )
    return out[:, :columns].to(dtype)


def _padded(data: Tensor, *, rows: bool) -> Tensor:
    """A matrix with zeros added, so that its columns (and its rows, if asked) are multiples of 16."""
    right = -data.shape[1] % MULTIPLE
    below = -data.shape[0] % MULTIPLE if rows else 0
    if not (right or below):
        return data
    bits = functional.pad(data.view(torch.uint8), (0, right, 0, below))
    return bits.view(data.dtype)
