"""The origin of tensors: for each storage, the operation that wrote it last and the reason for its dtype.

Invariants:

- storages are referenced weakly, and an origin is removed with its storage; long chains are cut;
- views share their storage, and so their origin.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from precast import _torch
from precast.report.saved_trace import LineageStep
from precast.report.schema import FindingLocation, Phase

__all__ = ["MOVES", "CastCosts", "Lineage", "Origin", "Upcast", "chain"]

_LONGEST: Final = 64

MOVES: Final = (
    {"abs", "amax", "amin", "cat", "clone", "constant_pad_nd", "copy_", "flip", "gather", "index"}
    | {"index_select", "masked_fill", "max", "min", "neg", "pixel_shuffle", "relu", "relu_"}
    | {"repeat", "roll", "sort", "stack", "topk", "where", "max_unpool2d", "max_unpool3d"}
    | {f"max_pool{n}d{end}" for n in (1, 2, 3) for end in ("", "_with_indices")}
    | {f"{kind}_pad{n}d" for n in (1, 2, 3) for kind in ("reflection", "replication")}
)
"""Operations whose results are values of their inputs, or the negatives of these, so that 16 bits hold them too."""


@dataclass(slots=True)
class CastCosts:
    """Casts of one kind at one site, and their total cost."""

    where: FindingLocation
    seconds: float = 0.0
    bytes: int = 0
    by_step: dict[int, float] = field(default_factory=dict)
    """The seconds of each traced step."""

    @property
    def op(self) -> str:
        """The operation that made the casts."""
        return self.where.op or ""

    def add(self, seconds: float, size: int, step: int) -> None:
        """Add the cost of another cast, in a step."""
        self.seconds += seconds
        self.bytes += size
        self.by_step[step] = self.by_step.get(step, 0.0) + seconds


@dataclass(slots=True, kw_only=True)
class Upcast(CastCosts):
    """A cast from 16 bits to float32, by a rule or by the program."""

    rule: str | None
    dtype: torch.dtype
    uses: list[Any] = field(default_factory=list)
    """The round trips that begin with it, which end when its result is used in float32."""
    is_used: bool = False
    """True if an operation computed with its result in float32."""

    def use(self) -> None:
        """Record that an operation computes with the result in float32."""
        self.is_used = True
        for trip in self.uses:
            trip.is_used = True


@dataclass(slots=True, eq=False)
class Origin:
    """The operation that wrote a storage."""

    step: LineageStep
    phase: Phase
    dtype: torch.dtype
    parent: Origin | None
    """The origin that decided the dtype, if no rule did."""
    iteration: int
    """The number of optimizer steps before."""
    bytes: int
    upcast: Upcast | None = None
    """The cast of these values from 16 bits, if 16 bits still hold them."""
    island: Any = None
    """The float32 island of these values."""
    depth: int = 0


class _StorageRef(weakref.ref[Any]):
    __slots__ = ("key",)
    key: int


class Lineage:
    """The origins of all storages that are alive."""

    def __init__(self) -> None:
        self._origins: dict[int, tuple[_StorageRef, Origin]] = {}
        origins = self._origins

        def remove(ref: Any) -> None:
            entry = origins.get(ref.key)
            if entry is not None and entry[0] is ref:
                del origins[ref.key]

        self._remove = remove

    def __len__(self) -> int:
        return len(self._origins)

    def of(self, tensor: Tensor) -> Origin | None:
        """Return the origin of a tensor's storage; None if it was not recorded."""
        storage = _storage(tensor)
        entry = None if storage is None else self._origins.get(id(storage))
        return entry[1] if entry is not None and entry[0]() is storage else None

    def put(self, tensor: Tensor, origin: Origin) -> None:
        """Record the origin of a tensor that was just written."""
        storage = _storage(tensor)
        if storage is None:
            return
        if origin.parent is not None:
            origin.depth = origin.parent.depth + 1
            if origin.depth >= _LONGEST:
                _cut(origin)
        entry = self._origins.get(id(storage))
        if entry is not None and entry[0]() is storage:
            ref = entry[0]
        else:
            ref = _StorageRef(storage, self._remove)
            ref.key = id(storage)
        self._origins[ref.key] = ref, origin

    def alive(self, iteration: int) -> Iterator[Origin]:
        """Yield the origins of results of forward in an iteration that are still in memory."""
        for _, origin in list(self._origins.values()):
            if origin.iteration == iteration and origin.phase == "forward":
                yield origin


def chain(origin: Origin | None) -> list[LineageStep]:
    """Return the steps back to the one that decided a dtype, the latest first."""
    steps = []
    while origin is not None:
        steps.append(origin.step)
        origin = origin.parent
    return steps


def _cut(origin: Origin) -> None:
    """Halve the length of a chain."""
    current: Origin | None = origin
    for depth in range(_LONGEST // 2, 0, -1):
        if current is None:
            return
        current.depth = depth
        current = current.parent
    if current is not None:
        current.parent, current.depth = None, 0


def _storage(tensor: Tensor) -> Any:
    if not _torch.is_plain(type(tensor)) or tensor.layout is not torch.strided:
        return None
    if _torch.is_functorch_wrapper(tensor):  # it has no storage
        return None
    return tensor.untyped_storage()
