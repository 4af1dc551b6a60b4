"""The part of a tensor that lies in this process: of a `DTensor`, as FSDP2 makes one of each parameter, its local one.

Invariants:

- a plain tensor is its own part, and what is written into a part is written into the tensor;
- what treats each number by itself may be done to the parts of tensors that are divided alike; of whatever looks at
  several numbers, or at a shape, the whole tensor is asked;
- only `largest_over` communicates.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from precast._torch import is_dtensor, local_tensor_of, version_of

__all__ = [
    "largest_over",
    "numbers_here",
    "part_of",
    "shard_number",
    "versions_of",
    "whole_like",
    "why_not",
]


def part_of(tensor: Tensor) -> Tensor:
    """The numbers that lie in this process, without gradient; the tensor itself where it is plain."""
    return local_tensor_of(tensor) if is_dtensor(tensor) else tensor


def numbers_here(tensor: Tensor) -> int:
    """How many numbers of it lie in this process."""
    return part_of(tensor).numel()


def whole_like(tensor: Any, part: Tensor) -> Tensor:
    """A tensor that is divided as another one of the same shape, from the part of it that lies in this process."""
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


def why_not(parameter: Any, others: Iterable[Any]) -> str | None:
    """Why the parts of these tensors are not those of the same numbers, each once; None where they are."""
    if not is_dtensor(parameter):
        return "a part of what it needs is sharded" if any(map(is_dtensor, others)) else None
    if any(placement.is_partial() for placement in parameter.placements):
        return "a weight is a sum of parts, of which each process has one"
    part = part_of(parameter)
    for other in others:
        if (
            not is_dtensor(other)
            or other.placements != parameter.placements
            or other.device_mesh != parameter.device_mesh
            or part_of(other).shape != part.shape
            or part_of(other).stride() != part.stride()
        ):
            return "its gradient or its states are sharded otherwise than a weight"
    return None


def largest_over(tensor: Any, number: Tensor) -> Tensor:
    """The largest of the numbers that the processes have which share a sharded tensor; shape ()."""
    from torch.distributed.tensor import Partial

    placements = [Partial("max")] * tensor.device_mesh.ndim
    made = type(tensor).from_local(number, tensor.device_mesh, placements, run_check=False)
    return made.full_tensor()  # type: ignore[no-any-return]


def shard_number(tensor: Any) -> int:
    """Which of the parts of a tensor is here: the same for replicas of a part, 0 where it is not divided."""
    if not is_dtensor(tensor):
        return 0
    mesh, number = tensor.device_mesh, 0
    for dimension, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            number = number * mesh.size(dimension) + mesh.get_local_rank(dimension)
    return number


def versions_of(tensor: Tensor) -> tuple[int, ...]:
    """What moves when somebody writes it: an operation on a `DTensor` moves its counter, one on its part the part's."""
    part = part_of(tensor)
    return (version_of(tensor),) if part is tensor else (version_of(tensor), version_of(part))
