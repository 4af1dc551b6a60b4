"""What a full trace notices beside its rows: round trips, float32 islands, weights that are cast again.

Invariants: what is noticed is summed up by place, `MOST` of each kind; weights are held weakly.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from precast import _torch
from precast.diagnostics.tracing.lineage import MOVES, Link, Up
from precast.weights.held import MIN_ELEMENTS_FOR_NODE

__all__ = ["MOST", "CastAgain", "Facts", "Island", "RoundTrip", "Weights"]

MOST: Final = 1000
_T = TypeVar("_T")


@dataclass(slots=True)
class RoundTrip:
    """Numbers that went from 16 bits to float32 and back, and were only moved in between."""

    up: Up
    op: str
    """What cast them back."""
    module: str | None
    source: str | None
    times: int = 0
    seconds: float = 0.0
    bytes: int = 0


@dataclass(slots=True)
class Island:
    """An operation that a rule has run in float32 between 16 bits."""

    op: str
    module: str | None
    source: str | None
    device: str
    policy: str
    calls: int = 0
    seconds: float = 0.0
    """On casts, into it and out of it."""
    bytes: int = 0
    inside: float = 0.0
    """Seconds in the operation."""
    returned: int = 0
    """How often what came out was cast back."""


@dataclass(slots=True)
class CastAgain:
    """A weight that was cast more than once while it stayed the same."""

    module: str | None
    source: str | None
    op: str
    shape: tuple[int, ...]
    dtype: str
    holdable: bool
    """Whether an attachment would hold it: where gradients are recorded, small ones are cast in each region."""
    casts: int = 0
    again: int = 0
    steps: int = 0
    """In how many steps it was cast again."""
    seconds: float = 0.0
    bytes: int = 0
    latest: tuple[Any, ...] = field(default=(), repr=False)


class Facts:
    """All that was noticed."""

    def __init__(self) -> None:
        self.round_trips: dict[tuple[Any, ...], RoundTrip] = {}
        self.islands: dict[tuple[Any, ...], Island] = {}
        self.weights = Weights()

    def carried(self, op: str, links: list[Link | None]) -> Up | None:
        """The way up of what an operation was given, where it only moves numbers."""
        if op.partition(".")[0] not in MOVES or not links:
            return None
        ups = [None if link is None else link.up for link in links]
        first = ups[0]
        if first is None or any(up is None or up.dtype is not first.dtype for up in ups):
            return None
        return first

    def moved(self, op: str, ups: list[Up]) -> Up | None:
        """The way up that an operation which only moves numbers was cast for."""
        return ups[0] if ups and op.partition(".")[0] in MOVES else None

    def island(
        self,
        key: tuple[str, str | None, str | None, str, str],
        ups: list[Up],
        inside: float,
    ) -> Island | None:
        """The island that a decision was; `key` is op, module, source, device type, policy."""
        island = _bounded(self.islands, key, lambda: Island(*key))
        if island is not None:
            island.calls += 1
            island.seconds += sum(up.seconds for up in ups)
            island.bytes += sum(up.bytes for up in ups)
            island.inside += inside
        return island

    def came_down(
        self,
        before: Link,
        to: tuple[str, str | None, str | None],
        dtype: torch.dtype,
        seconds: float,
        size: int,
    ) -> None:
        """A tensor was cast to 16 bits; `before` is what wrote it, `to` op, module and source of the cast."""
        if before.island is not None:
            before.island.seconds += seconds
            before.island.bytes += size
            before.island.returned += 1
        up = before.up
        if up is None or up.dtype is not dtype:
            return
        key = up.op, up.module, up.source, *to
        trip = _bounded(self.round_trips, key, lambda: RoundTrip(up, *to))
        if trip is not None:
            trip.times += 1
            trip.seconds += seconds + up.seconds
            trip.bytes += size + up.bytes


class Weights:
    """The weights that were cast to 16 bits."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], CastAgain] = {}
        self._alive: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._number = 0
        self._step = 0

    def __iter__(self) -> Any:
        return iter(list(self._known.values()))

    def new_step(self) -> None:
        """The optimizer has written weights, which may move no counter."""
        self._step += 1

    def saw(
        self,
        source: Tensor,
        dtype: torch.dtype,
        at: tuple[str, str | None, str | None],
        seconds: float,
        size: int,
    ) -> None:
        """A tensor was cast to 16 bits at op, module and source."""
        if _torch.is_functorch_wrapper(source):
            return
        base = _torch.base_of(source)
        weight = source if base is None else base
        if not (isinstance(weight, Parameter) or (weight.requires_grad and weight.is_leaf)):
            return
        op, module, place = at
        shape = tuple(source.shape)
        key = self._key_of(weight), source.storage_offset(), shape, dtype
        text = str(dtype).removeprefix("torch.")
        holdable = base is None and (
            not source.requires_grad or source.numel() >= MIN_ELEMENTS_FOR_NODE
        )
        cast = _bounded(
            self._known, key, lambda: CastAgain(module, place, op, shape, text, holdable)
        )
        if cast is None:
            return
        cast.casts += 1
        version = _torch.version_of(weight) if _torch.counts_versions(weight) else 0
        latest = version, weight.data_ptr() if weight.layout is torch.strided else 0, self._step
        if cast.latest[:3] == latest:
            cast.again += 1
            cast.seconds += seconds
            cast.bytes += size
            if not cast.latest[3]:
                cast.steps += 1
            cast.latest = *latest, True
        else:
            cast.latest = *latest, False

    def _key_of(self, weight: Tensor) -> int:
        """A number for a weight that no other gets: its address would be given out again."""
        key = id(weight)
        known = self._alive.get(key)
        if known is None or known[0]() is not weight:
            if len(self._alive) >= MOST:
                self._alive = {k: kept for k, kept in self._alive.items() if kept[0]() is not None}
            self._number += 1
            known = self._alive[key] = weakref.ref(weight), self._number
        return known[1]


def _bounded(known: dict[Any, _T], key: Any, make: Any) -> _T | None:
    found = known.get(key)
    if found is None and len(known) < MOST:
        found = known[key] = make()
    return found
