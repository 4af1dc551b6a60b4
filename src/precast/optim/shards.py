"""The part of a tensor in this process: the local tensor of a `DTensor`, such as a parameter of FSDP2.

Invariants:

- a plain tensor is its own part, and writes to a part write the tensor;
- elementwise operations may be applied to the parts of tensors with the same sharding; operations that read several
  elements or the shape need the whole tensor;
- only `largest_over` communicates.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from precast._torch import is_dtensor, local_tensor_of, version_of

__all__ = ["largest_over", "part_of", "shard_number", "versions_of", "whole_like"]


def part_of(tensor: Tensor) -> Tensor:
    """Return the local tensor of a `DTensor`, without gradient, or the plain tensor itself."""
    return local_tensor_of(tensor) if is_dtensor(tensor) else tensor


def whole_like(tensor: Any, part: Tensor) -> Tensor:
    """Return a tensor with the shape and sharding of `tensor`, from its part in this process."""
    if not is_dtensor(tensor):
        return part
    return type(tensor).from_local(  # type: ignore[no-any-return]
        part,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def largest_over(tensor: Any, number: Tensor) -> Tensor:
    """Return the largest value over the processes that share a sharded tensor; shape ()."""
    from torch.distributed.tensor import Partial

    placements = [Partial("max")] * tensor.device_mesh.ndim
    partial = type(tensor).from_local(number, tensor.device_mesh, placements, run_check=False)
    return partial.full_tensor()  # type: ignore[no-any-return]


def shard_number(tensor: Any) -> int:
    """Return the number of the part in this process, which replicas share; 0 for a plain tensor."""
    if not is_dtensor(tensor):
        return 0
    mesh, number = tensor.device_mesh, 0
    for dimension, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            number = number * mesh.size(dimension) + mesh.get_local_rank(dimension)
    return number


def versions_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the version counters of a tensor and its part, which writes to a `DTensor` increment separately."""
    part = part_of(tensor)
    return (version_of(tensor),) if part is tensor else (version_of(tensor), version_of(part))
