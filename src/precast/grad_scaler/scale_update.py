"""How the scale changes at the end of an iteration: by what was found, or to a value that is given.

Invariants: scale and growth tracker are changed in place on their device, without waiting for it; the scale stays
finite and between the limits.
"""

from __future__ import annotations

from torch import Tensor

from precast import _torch
from precast.grad_scaler.settings import LARGEST_SCALE, Limits

__all__ = ["adapt_scale", "set_scale"]


def set_scale(scale: Tensor, value: float | Tensor, limits: Limits) -> None:
    """Sets the scale to a number between the limits, or to a tensor that is moved between them."""
    scale.copy_(value)  # type: ignore[arg-type]
    if isinstance(value, Tensor):
        scale.nan_to_num_(nan=limits.min_scale).clamp_(limits.min_scale, limits.max_scale)


def adapt_scale(
    scale: Tensor,
    tracker: Tensor,
    found_inf: Tensor,
    factors: tuple[float, float, int],
    limits: Limits,
    *,
    skipped: bool | None,
) -> None:
    """Lowers the scale after a skipped iteration; raises it after enough good ones.

    Args:
        scale: Float32, shape ().
        tracker: The number of good iterations in a row, int32, shape ().
        found_inf: Nonzero if the iteration was skipped, shape ().
        factors: What the scale is multiplied by when it grows, and when it shrinks; how many good iterations it takes
            to grow.
        limits: Where the scale has to stay.
        skipped: Whether the iteration was skipped; None if only the device knows.
    """
    growth, backoff, interval = factors
    _torch.update_scale_(
        scale, tracker, found_inf, growth=growth, backoff=backoff, interval=interval
    )
    if skipped is not False or growth < 1.0 or limits.max_scale < LARGEST_SCALE:
        scale.clamp_(limits.min_scale, limits.max_scale)
