"""Where tensors come from: for each storage, what wrote it last and why it has its dtype.

Invariants:

- storages are referenced weakly, and what is known of one is forgotten when it is freed; a chain that gets long is cut;
- a view shares its storage with others, and so what is known of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from precast import _torch
from precast.diagnostics.schema import Phase
from precast.diagnostics.tracing.explanation import LineageStep

__all__ = ["MOVES", "Lineage", "Link", "Noticed", "Site", "Up"]

_LONGEST: Final = 64

MOVES: Final = (
    {"abs", "amax", "amin", "cat", "clone", "constant_pad_nd", "copy_", "flip", "gather", "index"}
    | {"index_select", "masked_fill", "max", "min", "neg", "pixel_shuffle", "relu", "relu_"}
    | {"repeat", "roll", "sort", "stack", "topk", "where", "max_unpool2d", "max_unpool3d"}
    | {f"max_pool{n}d{end}" for n in (1, 2, 3) for end in ("", "_with_indices")}
    | {f"{kind}_pad{n}d" for n in (1, 2, 3) for kind in ("reflection", "replication")}
)
"""Operations whose results are numbers that they were given, or their negatives: 16 bits hold them as well."""


class Site(NamedTuple):
    """Which operation made a cast, and where."""

    op: str
    module: str | None
    source: str | None


@dataclass(slots=True)
class Noticed:
    """Casts of one kind at one site, and what they cost together."""

    op: str
    module: str | None
    source: str | None
    seconds: float = 0.0
    bytes: int = 0
    by_step: dict[int, float] = field(default_factory=dict)
    """The seconds of each traced step."""

    def add(self, seconds: float, size: int, step: int) -> None:
        """Adds the cost of one more, in a step."""
        self.seconds += seconds
        self.bytes += size
        self.by_step[step] = self.by_step.get(step, 0.0) + seconds


@dataclass(slots=True, kw_only=True)
class Up(Noticed):
    """A cast from 16 bits to float32, by a rule or by the program."""

    rule: str | None
    dtype: torch.dtype
    uses: list[Any] = field(default_factory=list)
    """The round trips that begin with it; they are told if its result is used in float32."""
    is_used: bool = False
    """Whether an operation computed with its result in float32."""

    def use(self) -> None:
        """Record that an operation computes with the result in float32."""
        self.is_used = True
        for trip in self.uses:
            trip.is_used = True


@dataclass(slots=True, eq=False)
class Link:
    """What wrote a storage."""

    step: LineageStep
    phase: Phase
    dtype: torch.dtype
    parent: Link | None
    """What gave the result its dtype, if no rule did."""
    iteration: int
    """How many steps of optimizers came before."""
    bytes: int
    up: Up | None = None
    """The cast that brought these numbers from 16 bits, if 16 bits still hold them."""
    island: Any = None
    """The float32 island that they come from."""
    depth: int = 0


class _Ref(weakref.ref[Any]):
    __slots__ = ("key",)
    key: int


class Lineage:
    """What is known of all storages that are alive."""

    def __init__(self) -> None:
        self._links: dict[int, tuple[_Ref, Link]] = {}
        links = self._links

        def forget(ref: Any) -> None:
            known = links.get(ref.key)
            if known is not None and known[0] is ref:
                del links[ref.key]

        self._forget = forget

    def __len__(self) -> int:
        return len(self._links)

    def of(self, tensor: Tensor) -> Link | None:
        """What wrote a tensor's storage; None if that was not seen."""
        storage = _storage(tensor)
        known = None if storage is None else self._links.get(id(storage))
        return known[1] if known is not None and known[0]() is storage else None

    def put(self, tensor: Tensor, link: Link) -> None:
        """Notes what has just written a tensor."""
        storage = _storage(tensor)
        if storage is None:
            return
        if link.parent is not None:
            link.depth = link.parent.depth + 1
            if link.depth >= _LONGEST:
                _cut(link)
        known = self._links.get(id(storage))
        if known is not None and known[0]() is storage:
            ref = known[0]
        else:
            ref = _Ref(storage, self._forget)
            ref.key = id(storage)
        self._links[ref.key] = ref, link

    def alive(self, iteration: int) -> Iterator[Link]:
        """What forward made in an iteration, as far as it is still in memory."""
        for _, link in list(self._links.values()):
            if link.iteration == iteration and link.phase == "forward":
                yield link


def chain(link: Link | None) -> list[LineageStep]:
    """The steps back to the one that decided a dtype, the latest first."""
    steps = []
    while link is not None:
        steps.append(link.step)
        link = link.parent
    return steps


def _cut(link: Link) -> None:
    """Halves a chain."""
    at: Link | None = link
    for depth in range(_LONGEST // 2, 0, -1):
        if at is None:
            return
        at.depth = depth
        at = at.parent
    if at is not None:
        at.parent, at.depth = None, 0


def _storage(tensor: Tensor) -> Any:
    if not _torch.is_plain(type(tensor)) or tensor.layout is not torch.strided:
        return None
    if _torch.is_functorch_wrapper(tensor):  # it stands for another tensor
        return None
    return tensor.untyped_storage()
