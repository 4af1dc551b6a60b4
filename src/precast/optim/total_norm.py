"""The norm of gradients together, of which some may be sharded over the processes of a mesh, and others not.

PyTorch's own norm raises for plain gradients beside sharded ones, and for those of two meshes (2.13).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from precast._torch import is_dtensor
from precast.optim.shards import largest_over, part_of

__all__ = ["total_norm"]


def total_norm(
    gradients: Sequence[Tensor],
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None = None,
) -> Tensor:
    """PyTorch's norm, over all processes where gradients are sharded: then it is the same number in each.

    Args:
        gradients: plain ones and sharded ones, also of several meshes.
        norm_type: which norm.
        error_if_nonfinite: whether a norm that is not finite raises RuntimeError, as PyTorch does.
        foreach: as for `torch.nn.utils.get_total_norm`.

    Returns:
        The norm, a plain tensor of shape ().
    """
    by_mesh: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        mesh = gradient.device_mesh if is_dtensor(gradient) else None  # type: ignore[attr-defined]
        by_mesh.setdefault(mesh, []).append(gradient)
    if not any(by_mesh):
        return get_total_norm(gradients, norm_type, error_if_nonfinite, foreach)
    norms = [
        get_total_norm(some, norm_type, foreach=foreach)
        if mesh is None
        else _norm_over(some, norm_type, foreach)
        for mesh, some in by_mesh.items()
    ]
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"The norm of order {norm_type} of the gradients is {norm.item()}, so they cannot be clipped. With "
            "error_if_nonfinite=False they are multiplied by what follows from it."
        )
    return norm


def _norm_over(gradients: Sequence[Any], norm_type: float, foreach: bool | None) -> Tensor:
    """The norm of gradients that the processes of one mesh have parts of."""
    if norm_type != math.inf:
        norm: Any = get_total_norm(gradients, norm_type, foreach=foreach)
        return norm.full_tensor()  # type: ignore[no-any-return]
    # PyTorch raises where one of the parts has no numbers (2.13), in that process alone, while others wait.
    parts = [part_of(gradient) for gradient in gradients]
    norms = [torch.linalg.vector_norm(part, norm_type) for part in parts if part.numel()]
    here = get_total_norm([*norms, parts[0].new_zeros(())], norm_type)
    # Comparing numbers of several processes may lose NaN.
    return largest_over(gradients[0], here.nan_to_num(nan=math.inf, posinf=math.inf))
