"""The total norm of gradients that may be plain, or sharded over the processes of several meshes.

PyTorch's own norm raises for plain gradients together with sharded ones, and for those of two meshes; that of 16-bit
gradients has their dtype, so it overflows, and clipping by it makes all gradients 0 (2.13).

Invariants:

- norms of 16-bit gradients are computed in float32, and are float32: they overflow where those of float32 gradients do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from precast._torch import SIXTEEN_BIT, float32_norms, is_dtensor
from precast.optim.shards import largest_over, part_of

__all__ = ["clip_to_norm", "total_norm"]


def total_norm(
    gradients: Sequence[Tensor],
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None = None,
) -> Tensor:
    """Return the norm of plain and sharded gradients, shape (), with the same value in all processes."""
    by_mesh: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        mesh = gradient.device_mesh if is_dtensor(gradient) else None  # type: ignore[attr-defined]
        by_mesh.setdefault(mesh, []).append(gradient)
    norms = [
        _norm(group, norm_type, foreach) if mesh is None else _norm_over(group, norm_type, foreach)
        for mesh, group in (by_mesh or {None: []}).items()
    ]
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return _checked(norm, norm_type) if error_if_nonfinite else norm


def _norm(gradients: Sequence[Tensor], norm_type: float, foreach: bool | None) -> Tensor:
    """Return the norm of gradients of one mesh, or of plain ones."""
    narrow = [gradient for gradient in gradients if gradient.dtype in SIXTEEN_BIT]
    if not narrow:
        return get_total_norm(gradients, norm_type, foreach=foreach)
    others = [gradient for gradient in gradients if gradient.dtype not in SIXTEEN_BIT]
    norms = float32_norms(narrow, norm_type)
    norms += [torch.linalg.vector_norm(gradient, norm_type) for gradient in others]
    stacked = torch.stack([norm.to(norms[0].device) for norm in norms])
    norm: Tensor = torch.linalg.vector_norm(stacked, norm_type)
    return norm


def _checked(norm: Tensor, norm_type: float) -> Tensor:
    if not norm.isfinite():
        raise RuntimeError(
            f"The norm of order {norm_type} of the gradients is {norm.item()}, so they cannot be clipped. Pass "
            "error_if_nonfinite=False to multiply them by the resulting factor."
        )
    return norm


def clip_to_norm(
    parameters: Sequence[Tensor], max_norm: float, norm: Tensor, foreach: bool | None = None
) -> None:
    """Multiply gradients so that their norm, which is `norm` now, is at most `max_norm`."""
    for is_sharded in (
        False,
        True,
    ):  # PyTorch's function takes either plain gradients or sharded ones
        same_kind = [
            p for p in parameters if p.grad is not None and is_dtensor(p.grad) is is_sharded
        ]
        clip_grads_with_norm_(same_kind, max_norm, norm, foreach)


def _norm_over(gradients: Sequence[Any], norm_type: float, foreach: bool | None) -> Tensor:
    """Return the norm of gradients that are sharded over the processes of one mesh."""
    if norm_type != math.inf:
        norm: Any = _norm(gradients, norm_type, foreach)
        return norm.full_tensor()  # type: ignore[no-any-return]
    # PyTorch raises if one of the parts is empty (2.13), in that process alone, while the others wait.
    parts = [part_of(gradient) for gradient in gradients]
    norms = [torch.linalg.vector_norm(part, norm_type) for part in parts if part.numel()]
    own = get_total_norm([*norms, parts[0].new_zeros(())], norm_type)
    # A maximum over several processes may lose NaN.
    return largest_over(gradients[0], own.nan_to_num(nan=math.inf, posinf=math.inf))
