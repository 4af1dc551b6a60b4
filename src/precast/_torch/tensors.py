"""Private properties of tensors, such as versions and users of memory, and operations on lists of tensors.

Invariant: only `fused_copy`, `fused_add` and `fused_multiply` write tensors.
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
    "SIXTEEN_BIT",
    "base_of",
    "counts_versions",
    "fused_add",
    "fused_copy",
    "fused_multiply",
    "has_dense_keys",
    "is_dtensor",
    "is_in_graph_tree",
    "is_plain",
    "is_shared",
    "is_view",
    "local_tensor_of",
    "sparse_values",
    "stored_bytes",
    "version_if_counted",
    "version_of",
]

SIXTEEN_BIT: Final = frozenset({torch.bfloat16, torch.float16})
"""The floating-point dtypes of 16 bits."""

# Tensor attributes without a public name.
version_of: Callable[[torch.Tensor], int] = attrgetter("_version")

base_of: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("_base")

is_view: Callable[[torch.Tensor], bool] = torch.Tensor._is_view


def counts_versions(tensor: torch.Tensor) -> bool:
    """Return True if the tensor has a version counter."""
    return version_if_counted(tensor) is not None


def version_if_counted(tensor: torch.Tensor) -> int | None:
    """Return the version of a tensor; None for inference tensors, which have no counter, even after `p.data = q`."""
    try:
        version = version_of(tensor)
    except RuntimeError:
        return None
    return None if tensor.is_inference() else version


is_in_graph_tree: Callable[[torch.Tensor], bool] = getattr(torch._C, "_is_cached_tensor")  # noqa: B009 -- no stub
"""Return True if CUDA-graph trees manage a tensor's memory, which they write without incrementing its version counter.
PyTorch's own weight cache uses the same test (2.11)."""


def sparse_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the stored values of a sparse COO tensor; the public `values()` refuses duplicate indices (2.13)."""
    return tensor._values()


def has_dense_keys(tensor: torch.Tensor) -> bool:
    """Return True if a tensor has exactly the dispatch keys of dense tensors on its device (2.13).

    Sparse, nested, quantized, mkldnn and meta tensors, wrappers of `torch.func`, subclasses with
    ``__torch_dispatch__`` and tensors with a lazy conjugation or negation have other keys.
    """
    return torch._C._dispatch_keys(tensor).raw_repr() in _dense_keys(tensor.device.type)


@functools.cache
def _dense_keys(device_type: str) -> frozenset[int]:
    """Return the dispatch keys of dense tensors that are created outside and inside inference mode."""
    keys = set()
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        for is_inference in (False, True):
            with torch.inference_mode(is_inference):
                tensor = torch.empty(0, device=device_type)
                keys.add(torch._C._dispatch_keys(tensor).raw_repr())
    return frozenset(keys)


def stored_bytes(tensor: torch.Tensor) -> int:
    """Return the size of the stored elements of a tensor in bytes; 0 if it is symbolic (2.13).

    For a sparse tensor this is the size of its values, without the indices.
    """
    if not is_plain(type(tensor)) or tensor.layout is torch.strided:
        size = tensor.numel() * tensor.element_size()
        return size if type(size) is int else 0  # a jagged tensor has a symbolic size
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    elif tensor.layout in _COMPRESSED:
        tensor = tensor.values()
    return tensor.numel() * tensor.element_size()


_COMPRESSED: Final = frozenset(
    {torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
)


def is_plain(kind: type[torch.Tensor]) -> bool:
    """Return True if tensors of a class store plain values: the class does not override ``__torch_dispatch__``."""
    is_basic = kind is torch.nn.Parameter or kind is torch.Tensor
    return is_basic or kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return True for a `DTensor`. Its module is slow to import, so it is only looked up: without it there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


local_tensor_of: Callable[[torch.Tensor], torch.Tensor] = attrgetter("_local_tensor")
"""Return the part of a `DTensor` in this process. The public `to_local()` records a graph, or returns a new view of a
parameter in each call (2.13)."""


def is_shared(tensor: torch.Tensor) -> bool:
    """Return True if another tensor, array, capsule or storage object uses the memory of a tensor.

    No public function counts the users of a storage (2.13). The storage counts tensors, arrays and capsules. Python
    counts the references to the storage object.
    """
    tensors, variables = _users(tensor)
    return tensors > _UNSHARED_COUNTS[0] or variables > _UNSHARED_COUNTS[1]


def _users(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


with isolated():
    _UNSHARED_COUNTS: Final = _users(torch.empty(1, device="cpu"))
"""The result of `_users` for a tensor whose memory has no other users."""


def fused_copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Write each source into its target, in the target's dtype; on CUDA with few kernels (2.13).

    PyTorch's optimizers use this function; no public one copies many tensors at once.
    """
    torch._foreach_copy_(targets, sources)


def fused_add(targets: list[torch.Tensor], others: list[torch.Tensor], sign: int = 1) -> None:
    """Add `sign` times the other tensor, of the same dtype, to each target; on CUDA with few kernels (2.13).

    As for `fused_copy`, there is no public function.
    """
    torch._foreach_add_(targets, others, alpha=sign)


def fused_multiply(targets: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply each target by a tensor of its dtype and of shape (); on CUDA with few kernels (2.13)."""
    torch._foreach_mul_(targets, factor)
