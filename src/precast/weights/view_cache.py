"""Views of held copies: a view of a weight is, in lower precision, the same view of the weight's copy.

Nothing is stored here: the view is made from the copy at each use, and shares its memory.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["is_dense", "same_view"]


def same_view(copy: Tensor, base: Tensor, view: Tensor) -> Tensor | None:
    """The part of `copy` that `view` is of `base`, or None where no view of the copy is what a cast would give.

    A cast keeps the strides of a tensor without gaps, and no others: with other strides another kernel may compute.
    The base may have got other data since the view was made, or be a part of more than was copied.
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
    """Whether the numbers of a tensor lie side by side in memory, each once, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
