"""Views of held copies. In lower precision, a view of a weight is the same view of the weight's copy.

Nothing is cached: each use makes the view, which shares the copy's memory.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["is_dense", "same_view"]


def same_view(copy: Tensor, base: Tensor, view: Tensor) -> Tensor | None:
    """Return the view of `copy` that corresponds to `view` of `base`; None if a cast would give another result.

    A cast keeps the strides of a tensor without gaps only, and other strides may select another kernel. `base` may have
    got other data since `view` was made, and may be a part of a larger storage.
    """
    offset = view.storage_offset() - base.storage_offset()
    if (
        view.is_neg()
        or not is_dense(view)
        or copy.stride() != base.stride()
        or view.untyped_storage().data_ptr() != base.untyped_storage().data_ptr()
        or not 0 <= offset <= copy.numel() - view.numel()
        or not is_dense(base)
    ):
        return None
    return copy.as_strided(view.shape, view.stride(), offset)


def is_dense(tensor: Tensor) -> bool:
    """Return True if the elements of a tensor fill a block of memory, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
