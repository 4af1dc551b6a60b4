"""Tensors: version and base, who shares their memory, which of them are plain numbers.

Invariants:

- nothing here changes a tensor, except `fused_copy`, which writes its targets.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from operator import attrgetter
from typing import Final

import torch

from precast._torch.modes import isolated

__all__ = [
    "base_of",
    "counts_versions",
    "fused_copy",
    "has_dense_keys",
    "is_dtensor",
    "is_in_graph_tree",
    "is_plain",
    "is_shared",
    "is_view",
    "local_tensor_of",
    "sparse_values",
    "stored_bytes",
    "version_of",
]

# Tensor attributes without a public spelling; the kernels that `engine.generated` writes read them in place.
version_of: Callable[[torch.Tensor], int] = attrgetter("_version")

base_of: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("_base")

is_view: Callable[[torch.Tensor], bool] = torch.Tensor._is_view


def counts_versions(tensor: torch.Tensor) -> bool:
    """Whether writes move a version counter: not of a tensor made in inference mode, even if its data was replaced."""
    try:
        version_of(tensor)
    except RuntimeError:
        return False
    return not tensor.is_inference()


is_in_graph_tree: Callable[[torch.Tensor], bool] = getattr(torch._C, "_is_cached_tensor")  # noqa: B009 -- no stub
"""Whether CUDA-graph trees manage a tensor's memory, which they write without moving its version counter. PyTorch's own
weight cache asks the same (2.11)."""


def sparse_values(tensor: torch.Tensor) -> torch.Tensor:
    """The stored values of a sparse COO tensor; the public `values()` refuses tensors with duplicate indices (2.13)."""
    return tensor._values()


def has_dense_keys(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has the dispatch keys of ordinary dense tensors on its device, and no others (2.13).

    Sparse, nested, quantized, mkldnn and meta tensors, wrappers of `torch.func`, subclasses with
    ``__torch_dispatch__`` and tensors with a pending conjugation or negation have others.
    """
    return torch._C._dispatch_keys(tensor).raw_repr() in _dense_keys(tensor.device.type)


@functools.cache
def _dense_keys(device_type: str) -> frozenset[int]:
    """The dispatch keys of dense tensors made outside and inside of inference mode."""
    keys = set()
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        for inference in (False, True):
            with torch.inference_mode(inference):
                tensor = torch.empty(0, device=device_type)
                keys.add(torch._C._dispatch_keys(tensor).raw_repr())
    return frozenset(keys)


def stored_bytes(tensor: torch.Tensor) -> int:
    """Return the size of the elements that a tensor stores; 0 where it is not a fixed number (2.13).

    Of a sparse tensor these are its values without the indices.
    """
    if not is_plain(type(tensor)) or tensor.layout is torch.strided:
        size = tensor.numel() * tensor.element_size()
        return size if type(size) is int else 0  # a jagged tensor has a symbolic number of elements
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    elif tensor.layout in _COMPRESSED:
        tensor = tensor.values()
    return tensor.numel() * tensor.element_size()


_COMPRESSED: Final = frozenset(
    {torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
)


def is_plain(kind: type[torch.Tensor]) -> bool:
    """Whether the tensors of a class are numbers in memory: the class has no ``__torch_dispatch__`` of its own."""
    is_known = kind is torch.nn.Parameter or kind is torch.Tensor
    return is_known or kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a `DTensor`. Its module takes long to import, and where nobody has, there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


local_tensor_of: Callable[[torch.Tensor], torch.Tensor] = attrgetter("_local_tensor")
"""The part of a `DTensor` that lies in this process. The public `to_local()` records a graph, or gives a new view of a
parameter's at each call (2.13)."""


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether another tensor, a storage that the program keeps, or anything else uses the memory of a tensor.

    Nothing public counts the users of a storage (2.13). The storage itself counts tensors, arrays and capsules; Python
    counts the variables that are bound to it, since a storage has one Python object.
    """
    tensors, variables = _users(tensor)
    return tensors > _ALONE[0] or variables > _ALONE[1]


def _users(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


with isolated():
    _ALONE: Final = _users(torch.empty(1, device="cpu"))
"""The counts for a tensor that nothing else shares: the tensor itself, and the function that counts."""


def fused_copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Writes each source into its target, in the target's dtype; on CUDA in few kernels (2.13).

    PyTorch's optimizers are made of such functions, and no public one copies many tensors at once.
    """
    torch._foreach_copy_(targets, sources)
