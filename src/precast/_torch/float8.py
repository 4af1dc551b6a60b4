"""PyTorch's kernel for products of float8 matrices. On the CPU it emulates 8 bits (2.13)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["scaled_mm"]


def scaled_mm(
    a: Tensor,
    b: Tensor,
    inverse_a: Tensor,
    inverse_b: Tensor,
    dtype: torch.dtype,
    *,
    by_row: bool,
    fast: bool,
) -> Tensor:
    """Return `(a * inverse_a) @ (b * inverse_b)` of float8 matrices, computed by PyTorch's kernel.

    Args:
        a: `(m, k)`, row-major.
        b: `(k, n)`, column-major; `k` and `n` are multiples of 16.
        inverse_a: float32, one element, or `(m, 1)` if `by_row`.
        inverse_b: float32, one element, or `(1, n)` if `by_row`.
        dtype: the dtype of the result.
        by_row: each row of `a` and each column of `b` has a separate scale.
        fast: allow accumulation in fewer bits than float32, which is faster on some GPUs.
    """
    public_function = getattr(functional, "scaled_mm", None)
    if public_function is None:  # an older PyTorch has the same kernel under a private name
        return torch._scaled_mm(a, b, inverse_a, inverse_b, out_dtype=dtype, use_fast_accum=fast)
    scaling = functional.ScalingType
    kind = scaling.RowWise if by_row else scaling.TensorWise
    product: Tensor = public_function(
        a, b, inverse_a, kind, inverse_b, kind, output_dtype=dtype, use_fast_accum=fast
    )
    return product
