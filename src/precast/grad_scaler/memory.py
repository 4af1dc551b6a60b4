"""Gives the numbers in a tensor of any kind as one real and dense tensor of this process that shares its memory.

Gradients are unscaled in this memory, and a monitor counts what is in it.

Invariants: nothing is copied, except that complex numbers whose conjugation is pending are resolved.
"""

from __future__ import annotations

import torch
from torch import Tensor

from precast import _torch

__all__ = ["are_finite", "is_finite", "local", "memory_of", "moved"]


def memory_of(tensor: Tensor) -> Tensor:
    """A tensor's numbers.

    Of a sparse tensor these are its stored values, of a complex one the real and imaginary parts, and of a `DTensor`
    this process's part.
    """
    tensor = local(tensor)
    if tensor.is_sparse:
        tensor = _torch.sparse_values(tensor)
    elif tensor.layout is not torch.strided:
        tensor = tensor.values()
    return torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor


def local(tensor: Tensor) -> Tensor:
    """This process's part of a `DTensor`; any other tensor itself."""
    if not _torch.is_dtensor(tensor):
        return tensor
    part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`; waits only for a copy to the CPU, which could be read too early otherwise."""
    if tensor.device == device:
        return tensor
    return tensor.to(device, non_blocking=device.type != "cpu")


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor of any kind has neither infinity nor NaN in this process; waits for the device."""
    return are_finite(memory_of(tensor.detach()))


def are_finite(numbers: Tensor) -> bool:
    """The same of a dense tensor.

    Its sum is looked at first. Only if that is not finite, as the sum itself may have overflowed, every number is.
    """
    return bool(numbers.sum().isfinite()) or bool(numbers.isfinite().all())
