"""Losses in the argument of `scale`: one tensor, or containers of any nesting.

Invariants: containers keep their types; only floating-point and complex tensors are scaled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from typing import Any, TypeVar

from torch import Tensor

from precast._internal.pytree import map_tensors
from precast.errors import ScalerError

__all__ = ["map_losses"]

T = TypeVar("T")


def map_losses(
    outputs: T, scaled: Callable[[Tensor], Tensor], scale_later: Callable[[Any], Any]
) -> T:
    """Return a loss or containers of losses, with each loss replaced by `scaled(loss)`.

    Iterators and sets become lazy ``map`` objects of `scale_later`, as in PyTorch.
    """
    others = []

    def of_tensor(tensor: Tensor) -> Tensor:
        return scaled(tensor) if tensor.is_floating_point() or tensor.is_complex() else tensor

    def of_other(leaf: Any) -> Any:
        others.append(leaf)
        return map(scale_later, leaf) if isinstance(leaf, Iterator | AbstractSet) else leaf

    result = map_tensors(outputs, of_tensor, of_other)
    if others and result is outputs:
        raise ScalerError(
            f"scale() found no tensor in a {type(outputs).__name__}: pass the loss itself, "
            "not loss.item(), or losses in lists, tuples, dicts or dataclasses."
        )
    return result
