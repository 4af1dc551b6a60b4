"""What a full trace notices beside its rows: round trips, float32 islands, and weights that are cast again.

Invariants: what is noticed is added up by site, and at most `MOST` sites of each kind are kept; weights are referenced
weakly.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakIdKeyDictionary

from precast import _torch
from precast._internal.display import dtype_name
from precast.diagnostics.tracing.lineage import MOVES, Link, Noticed, Site, Up
from precast.diagnostics.tracing.trials import Call, Saving, call_of, saving
from precast.engine.operator_kinds import Cast
from precast.weights.held import MIN_ELEMENTS_FOR_NODE

__all__ = ["CastAgain", "Facts", "Island", "RoundTrip", "Weights"]

MOST: Final = 1000
_MOST_VALUES: Final = 1 << 16
_WHOLE: Final = ("int", "uint")
_T = TypeVar("_T")


@dataclass(slots=True, kw_only=True)
class RoundTrip(Noticed):
    """Numbers that were cast to float32 at one site and back at another, and were only moved in between."""

    rule: str | None
    """The rule of the cast to float32; None if the program asks for it."""
    dtype: torch.dtype
    back: Site
    times: int = 0
    is_used: bool = False
    """Whether an operation computed with the float32 numbers."""


@dataclass(slots=True, kw_only=True)
class Island(Noticed):
    """An operation that a rule runs in float32 while its inputs have 16 bits; the cost is that of casts to and fro."""

    device: str
    policy: str
    calls: int = 0
    returned: int = 0
    """How often a result was cast back."""
    used: int = 0
    """How often an operation computed with a result in float32."""
    returns: torch.dtype | None = None
    """The dtype to which results were cast back."""


@dataclass(slots=True, kw_only=True)
class CastAgain(Noticed):
    """A weight that was cast more than once while it stayed the same; the cost is that of the needless casts."""

    shape: tuple[int, ...]
    dtype: str
    holdable: bool
    """Whether an attachment would hold it: where gradients are recorded, small ones are cast in each region."""
    casts: int = 0
    again: int = 0
    is_in_one_region: bool = False
    """Whether it was cast again inside one outermost region, so that no wider region helps."""
    region: int | None = None
    """The number of the outermost region of its latest cast; None outside of regions."""
    latest: object = field(default=None, repr=False)
    """What tells whether the weight has changed since its latest cast."""


@dataclass(slots=True, kw_only=True)
class Rounded(Noticed):
    """Whole numbers that the program made float32, and that a rule cast to 16 bits, where several became one."""

    start: Site
    """The place where the program made them float32."""
    dtype: str
    values: tuple[Tensor, Tensor]
    """How many different values there were, and how many there are in 16 bits, on their device."""


class Facts:
    """All that was noticed."""

    def __init__(self) -> None:
        self.round_trips: dict[object, RoundTrip] = {}
        self.islands: dict[object, Island] = {}
        self.weights = Weights()
        self.rounded: dict[object, Rounded] = {}
        self.calls: dict[Site, Call] = {}
        """The first call of an operation at a site, for a trial in 16 bits."""
        self.savings: dict[object, Saving | None] = {}
        """The results of trials."""
        self.step = 0
        self.step_seconds: list[float] = []
        """The traced time of each whole step."""

    def new_step(self, seconds: float) -> None:
        """An optimizer has stepped; `seconds` is the traced time of all steps so far."""
        self.step_seconds.append(seconds - sum(self.step_seconds))
        self.step += 1
        self.weights.step = self.step

    def spread_of(self, by_step: Mapping[int, float]) -> tuple[float, float] | None:
        """Return the smallest and largest share of a step's time; None where fewer than two whole steps were traced."""
        whole = self.step_seconds
        if len(whole) < 2:
            return None
        shares = [by_step.get(step, 0.0) / max(time, 1e-12) for step, time in enumerate(whole)]
        return min(1.0, *shares), min(1.0, max(shares))

    def note_call(
        self, at: Site, overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Keep the description of a call, if it is the first at its site and can be run again."""
        if at not in self.calls and len(self.calls) < MOST:
            call = call_of(overload, args, kwargs)
            if call is not None:
                self.calls[at] = call

    def saving(
        self, at: Site, dtype: torch.dtype | None, returns: torch.dtype | None
    ) -> Saving | None:
        """Return what a call at a site saves in 16 bits; a trial is made once for each kind of call."""
        call = self.calls.get(at)
        if call is None or dtype is None:
            return None
        key = repr(call), dtype, returns
        if key not in self.savings:
            self.savings[key] = saving(call, dtype, returns=returns)
        return self.savings[key]

    def use(self, links: Iterable[Link | None], carried: Up | None = None) -> None:
        """Record that an operation computes with tensors in float32; `carried` is the cast that its result keeps."""
        for link in links:
            if link is not None and link.island is not None:
                link.island.used += 1
            if link is not None and link.up is not None and carried is None:
                link.up.use()

    def carried(self, op: str, links: list[Link | None], ups: list[Up]) -> Up | None:
        """The cast to float32 of what an operation only moves: before it (`links`), or for it (`ups`)."""
        if op.partition(".")[0] not in MOVES:
            return None
        before = [None if link is None else link.up for link in links]
        first = before[0] if before else None
        if first is None or any(up is None or up.dtype is not first.dtype for up in before):
            return ups[0] if ups else None
        return first

    def island(self, at: Site, device: str, policy: str, ups: list[Up]) -> Island | None:
        """Counts a call that casts its inputs to float32; returns the island of that site."""
        island = _bounded(
            self.islands, (at, device, policy), lambda: Island(*at, device=device, policy=policy)
        )
        if island is not None:
            island.calls += 1
            for up in ups:
                island.add(up.seconds, up.bytes, self.step)
        return island

    def rounds(self, before: Link, at: Site, cast: Cast) -> None:
        """Count the different values of a tensor that a rule casts, if the program made it float32 of whole numbers.

        Only the first tensor at a site is looked at.
        """
        step = before.step
        is_whole = step.op.partition(".")[0] == "arange" or (
            step.op == "_to_copy" and step.inputs[0].startswith(_WHOLE)
        )
        start = Site(step.op, step.module, step.source)
        key = start, at
        if not is_whole or step.rule is not None or key in self.rounded:
            return
        if len(self.rounded) < MOST and not _torch.is_functorch_wrapper(cast.source):
            with torch.no_grad():
                values = cast.source.detach().reshape(-1)[:_MOST_VALUES].sort().values
                counts = (_different(values), _different(values.to(cast.target.dtype)))
            self.rounded[key] = Rounded(
                *at, start=start, dtype=dtype_name(cast.target.dtype), values=counts
            )

    def came_down(self, before: Link, at: Site, cast: Cast) -> None:
        """Notes that a tensor was cast to 16 bits at a site; `before` is what wrote the tensor."""
        if before.island is not None:
            before.island.add(cast.seconds, cast.bytes, self.step)
            before.island.returned += 1
            before.island.returns = cast.target.dtype
        up = before.up
        if up is None or up.dtype is not cast.target.dtype:
            return
        start = Site(up.op, up.module, up.source)
        trip = _bounded(
            self.round_trips,
            (start, at),
            lambda: RoundTrip(*start, rule=up.rule, dtype=up.dtype, back=at),
        )
        if trip is not None:
            trip.times += 1
            trip.is_used |= up.is_used
            up.uses.append(trip)
            trip.add(cast.seconds + up.seconds, cast.bytes + up.bytes, self.step)


def _different(values: Tensor) -> Tensor:
    """Return how many different values sorted ones have, without waiting for the device."""
    return (values[1:] != values[:-1]).sum() + min(1, values.numel())


class Weights:
    """The weights that were cast to 16 bits."""

    def __init__(self) -> None:
        self._known: dict[object, CastAgain] = {}
        self._numbers = WeakIdKeyDictionary()
        """A number for each weight that no other gets, as an `id` may be given out again."""
        self._free_numbers = itertools.count()
        self.step = 0
        """The number of optimizer steps; they may write weights and leave their version counters as they are."""

    def __iter__(self) -> Iterator[CastAgain]:
        return iter(list(self._known.values()))

    def saw(self, at: Site, cast: Cast, region: int | None) -> None:
        """Record that a tensor was cast to 16 bits at a site, if it is a weight or a view of one.

        `region` is the number of the outermost region around.
        """
        source, dtype = cast.source, cast.target.dtype
        if _torch.is_functorch_wrapper(source):
            return
        base = _torch.base_of(source)
        weight = source if base is None else base
        if not (isinstance(weight, Parameter) or (weight.requires_grad and weight.is_leaf)):
            return
        shape = tuple(source.shape)
        number = self._numbers.setdefault(weight, next(self._free_numbers))
        key = number, source.storage_offset(), shape, dtype
        holdable = base is None and (
            not source.requires_grad or source.numel() >= MIN_ELEMENTS_FOR_NODE
        )
        found = _bounded(
            self._known,
            key,
            lambda: CastAgain(*at, shape=shape, dtype=dtype_name(dtype), holdable=holdable),
        )
        if found is None:
            return
        found.casts += 1
        version = _torch.version_of(weight) if _torch.counts_versions(weight) else 0
        has_memory = _torch.is_plain(type(weight)) and weight.layout is torch.strided
        latest = version, weight.data_ptr() if has_memory else 0, self.step
        if found.latest == latest:
            found.again += 1
            found.is_in_one_region |= region is not None and region == found.region
            found.add(cast.seconds, cast.bytes, self.step)
        found.latest, found.region = latest, region


def _bounded(known: dict[object, _T], key: object, make: Any) -> _T | None:
    found = known.get(key)
    if found is None and len(known) < MOST:
        found = known[key] = make()
    return found
