"""Access to the values of any tensor as one real, dense tensor of this process that shares its memory.

Gradients are unscaled in this memory, and a monitor counts its values.

Invariant: nothing is copied, except complex values with a pending conjugation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from precast import _torch
from precast.optim.shards import part_of

__all__ = ["are_finite", "is_finite", "memory_of", "moved"]


def memory_of(tensor: Tensor) -> Tensor:
    """Return a tensor's values as a real, dense tensor.

    These are the stored values of a sparse tensor, the real and imaginary parts of a complex one, and this process's
    part of a `DTensor`.
    """
    tensor = part_of(tensor)
    if tensor.is_sparse:
        tensor = _torch.sparse_values(tensor)
    elif tensor.layout is not torch.strided:
        tensor = tensor.values()
    return torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return `tensor` on `device`; wait only for a copy to the CPU, which could be read too early otherwise."""
    if tensor.device == device:
        return tensor
    return tensor.to(device, non_blocking=device.type != "cpu")


def is_finite(tensor: Tensor) -> bool:
    """Return True if a tensor of any kind has neither infinity nor NaN in this process; wait for the device."""
    return are_finite(memory_of(tensor.detach()))


def are_finite(values: Tensor) -> bool:
    """Return True if a dense tensor has neither infinity nor NaN; wait for the device.

    Its sum is checked first. All values are checked only if the sum is not finite: the sum itself may have overflowed.
    """
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())
