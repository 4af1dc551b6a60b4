"""What a tensor is: its version and base, who shares its memory, whether it is plain numbers.

Invariants:

- nothing here changes a tensor, but `fused_copy`, which writes its targets.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from operator import attrgetter
from typing import Final

import torch

__all__ = [
    "base_of",
    "counts_versions",
    "fused_copy",
    "is_dtensor",
    "is_in_graph_tree",
    "is_plain",
    "is_shared",
    "is_view",
    "sparse_values",
    "version_of",
]

# Tensor attributes without a public spelling; the kernels that `engine.generated` writes read them in place.
version_of: Callable[[torch.Tensor], int] = attrgetter("_version")

base_of: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("_base")

is_view: Callable[[torch.Tensor], bool] = torch.Tensor._is_view


def counts_versions(tensor: torch.Tensor) -> bool:
    """Whether writes to a tensor can be seen: not where it was made in inference mode, whatever its data is now."""
    try:
        version_of(tensor)
    except RuntimeError:
        return False
    return not tensor.is_inference()


# Whether CUDA-graph trees manage a tensor's memory, and write it unseen: PyTorch's own cache asks the same (2.11).
is_in_graph_tree: Callable[[torch.Tensor], bool] = getattr(torch._C, "_is_cached_tensor")  # noqa: B009 -- no stub


def sparse_values(tensor: torch.Tensor) -> torch.Tensor:
    """The stored values of a sparse COO tensor; the public `values()` refuses tensors with duplicate indices (2.13)."""
    return tensor._values()


def is_plain(kind: type[torch.Tensor]) -> bool:
    """Whether the tensors of a class are numbers in memory: a subclass without a dispatch of its own.

    Nothing private: the one answer for all who ask.
    """
    is_known = kind is torch.nn.Parameter or kind is torch.Tensor
    return is_known or kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether it is a `DTensor`, whose module takes long to import: without it there is none.

    Nothing private: the one answer for all who ask.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether another tensor, a storage that the program keeps, or anything else shares the memory of one.

    Nothing public counts the users of a storage (2.13): tensors, arrays and capsules are counted by the storage itself,
    variables that are bound to it by Python, as there is one object for it whoever asks.
    """
    tensors, variables = _users(tensor)
    return tensors > _ALONE[0] or variables > _ALONE[1]


def _users(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


_ALONE: Final = _users(torch.empty(1, device="cpu"))
"""What is counted of a tensor that is alone: itself, and what asks."""


def fused_copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Writes each source into its target, in the target's dtype; on CUDA in few kernels.

    The `_foreach` functions have no public list; optimizers are made of them (2.13).
    """
    torch._foreach_copy_(targets, sources)
