"""The kernel for products of float8 matrices: who has one, and how it is called.

Invariants:

- the kernel is PyTorch's; nothing here computes;
- on the CPU there is none that computes in 8 bits: what `scaled_mm` does there (2.13) is an emulation.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["float8_architecture", "scaled_mm"]


def float8_architecture(device: torch.device) -> tuple[str, str]:
    """The vendor of a device, `nvidia`, `amd` or "", and its architecture as the vendor says it, such as `8.9`."""
    if device.type != "cuda":
        return "", ""
    if torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability(device)
        return "nvidia", f"{major}.{minor}"
    # PyTorch gives AMD's name of an architecture in no other way (2.13).
    name = torch.cuda.get_device_properties(device).gcnArchName
    return "amd", name.partition(":")[0]


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
    """`(a * inverse_a) @ (b * inverse_b)` of float8 matrices, by PyTorch's kernel.

    Args:
        a: `(m, k)`, row by row in memory.
        b: `(k, n)`, column by column in memory; `k` and `n` are multiples of 16.
        inverse_a: float32, one number, or `(m, 1)` where `by_row`.
        inverse_b: float32, one number, or `(1, n)` where `by_row`.
        dtype: the result's.
        by_row: whether each row of `a` and each column of `b` has a scale of its own.
        fast: whether the sum may be kept in fewer bits than float32 has, which some GPUs do faster.
    """
    public = getattr(functional, "scaled_mm", None)
    if public is None:  # the same kernel under its older name, which is private
        return torch._scaled_mm(a, b, inverse_a, inverse_b, out_dtype=dtype, use_fast_accum=fast)
    scaling = functional.ScalingType
    kind = scaling.RowWise if by_row else scaling.TensorWise
    product: Tensor = public(
        a, b, inverse_a, kind, inverse_b, kind, output_dtype=dtype, use_fast_accum=fast
    )
    return product
