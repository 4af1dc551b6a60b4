"""Patterns in a full trace: round trips, float32 islands, weights cast repeatedly, rounded integers and limits.

Invariants: costs are summed by site, with at most `MOST` sites of each kind; weights are referenced weakly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakIdKeyDictionary

from precast import _torch
from precast._internal.display import dtype_name
from precast.diagnostics.tracing.lineage import MOVES, CastCosts, Origin, Upcast
from precast.diagnostics.tracing.trials import TrialCall, TrialSaving, describe_call, measure_saving
from precast.engine.operator_kinds import Cast
from precast.report.schema import FindingLocation
from precast.weights.held import is_held_in_training

__all__ = ["CastPatterns", "Float32Island", "RecastWeights", "RepeatedCast", "RoundTrip"]

MOST: Final = 1000
_MOST_VALUES: Final = 1 << 16
_WHOLE: Final = ("int", "uint")
_T = TypeVar("_T")


@dataclass(slots=True, kw_only=True)
class RoundTrip(CastCosts):
    """A tensor that was cast to float32 at one site and back at another, and only moved in between."""

    rule: str | None
    """The rule of the cast to float32; None for an explicit cast of the program."""
    dtype: torch.dtype
    back: FindingLocation
    times: int = 0
    is_used: bool = False
    """True if an operation computed with the float32 values."""


@dataclass(slots=True, kw_only=True)
class Float32Island(CastCosts):
    """An operation that a rule runs in float32 on 16-bit inputs; the cost is that of the casts in both directions."""

    device: str
    policy: str
    calls: int = 0
    returned: int = 0
    """The number of results that were cast back."""
    used: int = 0
    """The number of operations that computed with a result in float32."""
    returns: torch.dtype | None = None
    """The dtype to which results were cast back."""


@dataclass(slots=True, kw_only=True)
class RepeatedCast(CastCosts):
    """A weight that was cast more than once without a change; the cost is that of the repeated casts."""

    shape: tuple[int, ...]
    dtype: str
    holdable: bool
    """True if an attachment would hold it. With gradients recorded, small weights are cast in each region."""
    casts: int = 0
    again: int = 0
    is_in_one_region: bool = False
    """True if it was cast repeatedly inside one outermost region, so that a wider region does not help."""
    region: int | None = None
    """The number of the outermost region of its latest cast; None outside of regions."""
    latest: object = field(default=None, repr=False)
    """The version, address and step of its latest cast, which tell if the weight has changed since."""


@dataclass(slots=True, kw_only=True)
class RoundedIntegers(CastCosts):
    """Integers that the program cast to float32 and a rule cast to 16 bits, where several values became one."""

    start: FindingLocation
    """The site of the program's cast to float32."""
    dtype: str
    values: tuple[Tensor, Tensor]
    """The numbers of different values before, and in 16 bits, on their device."""


class CastPatterns:
    """All patterns of one trace."""

    def __init__(self) -> None:
        self.round_trips: dict[object, RoundTrip] = {}
        self.islands: dict[object, Float32Island] = {}
        self.weights = RecastWeights()
        self.rounded: dict[object, RoundedIntegers] = {}
        self.limits: dict[tuple[FindingLocation, float, int, str], Tensor] = {}
        """Limits of `clamp` that a 16-bit dtype rounds to 0, 1 or -1 -> the number of results with that value."""
        self.calls: dict[FindingLocation, TrialCall] = {}
        """The first call of an operation at each site, for a trial in 16 bits."""
        self.savings: dict[object, TrialSaving | None] = {}
        """The results of trials."""
        self.step = 0
        self.step_seconds: list[float] = []
        """The traced time of each complete step."""

    def new_step(self, seconds: float) -> None:
        """Record an optimizer's step; `seconds` is the traced time of all steps so far."""
        self.step_seconds.append(seconds - sum(self.step_seconds))
        self.step += 1
        self.weights.step = self.step

    def spread_of(self, by_step: Mapping[int, float]) -> tuple[float, float] | None:
        """Return the smallest and largest share of a step's time; None for fewer than two complete steps."""
        times = self.step_seconds
        if len(times) < 2:
            return None
        shares = [by_step.get(step, 0.0) / max(time, 1e-12) for step, time in enumerate(times)]
        return min(1.0, *shares), min(1.0, max(shares))

    def note_call(
        self, at: FindingLocation, overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Store the description of a call, if it is the first at its site and can be repeated."""
        if at not in self.calls and len(self.calls) < MOST:
            call = describe_call(overload, args, kwargs)
            if call is not None:
                self.calls[at] = call

    def measure_saving(
        self, at: FindingLocation, dtype: torch.dtype | None, returns: torch.dtype | None
    ) -> TrialSaving | None:
        """Return the saving of a call at a site in 16 bits, measured once for each kind of call."""
        call = self.calls.get(at)
        if call is None or dtype is None:
            return None
        key = repr(call), dtype, returns
        if key not in self.savings:
            self.savings[key] = measure_saving(call, dtype, returns=returns)
        return self.savings[key]

    def use(self, origins: Iterable[Origin | None], carried: Upcast | None = None) -> None:
        """Record that an operation computes with tensors in float32; `carried` is the upcast that its result keeps."""
        for origin in origins:
            if origin is not None and origin.island is not None:
                origin.island.used += 1
            if origin is not None and origin.upcast is not None and carried is None:
                origin.upcast.use()

    def carried(
        self, op: str, origins: list[Origin | None], upcasts: list[Upcast]
    ) -> Upcast | None:
        """Return the upcast of values that an operation only moves: of its `origins`, or of its own `upcasts`."""
        if op.partition(".")[0] not in MOVES:
            return None
        earlier = [None if origin is None else origin.upcast for origin in origins]
        first = earlier[0] if earlier else None
        if first is None or any(up is None or up.dtype is not first.dtype for up in earlier):
            return upcasts[0] if upcasts else None
        return first

    def island(
        self, at: FindingLocation, device: str, policy: str, upcasts: list[Upcast]
    ) -> Float32Island | None:
        """Count a call that casts its inputs to float32, and return the island of that site."""
        island = _bounded(
            self.islands,
            (at, device, policy),
            lambda: Float32Island(at, device=device, policy=policy),
        )
        if island is not None:
            island.calls += 1
            for upcast in upcasts:
                island.add(upcast.seconds, upcast.bytes, self.step)
        return island

    def rounds(self, before: Origin, at: FindingLocation, cast: Cast) -> None:
        """Count the different values of a tensor that a rule casts, if the program cast it from integers to float32.

        Only the first tensor at each site is examined.
        """
        step = before.step
        is_whole = step.op.partition(".")[0] == "arange" or (
            step.op == "_to_copy" and step.inputs[0].startswith(_WHOLE)
        )
        start = FindingLocation(step.module, step.op, step.source)
        key = start, at
        if not is_whole or step.rule is not None or key in self.rounded:
            return
        if len(self.rounded) < MOST and not _torch.is_functorch_wrapper(cast.source):
            with torch.no_grad():
                values = cast.source.detach().reshape(-1)[:_MOST_VALUES].sort().values
                counts = (_different(values), _different(values.to(cast.target.dtype)))
            self.rounded[key] = RoundedIntegers(
                at, start=start, dtype=dtype_name(cast.target.dtype), values=counts
            )

    def limited(self, at: FindingLocation, call: TrialCall, out: Any) -> None:
        """Count the results of `clamp` that equal a limit which 16 bits round to 0, 1 or -1."""
        if not (at.op or "").startswith("clamp") or out.dtype not in _torch.SIXTEEN_BIT:
            return
        for limit in (*call.args, *call.kwargs.values()):
            rounded = _rounded_limit(limit, out.dtype) if isinstance(limit, float) else None
            if rounded is None or not _torch.is_real() or _torch.is_capturing():
                continue
            key = at, limit, rounded, dtype_name(out.dtype)
            if key in self.limits or len(self.limits) < MOST:
                self.limits[key] = self.limits.get(key, 0) + (out == rounded).sum()

    def came_down(self, before: Origin, at: FindingLocation, cast: Cast) -> None:
        """Record that a tensor was cast to 16 bits at a site; `before` is the tensor's origin."""
        if before.island is not None:
            before.island.add(cast.seconds, cast.bytes, self.step)
            before.island.returned += 1
            before.island.returns = cast.target.dtype
        upcast = before.upcast
        if upcast is None or upcast.dtype is not cast.target.dtype:
            return
        start = upcast.where
        trip = _bounded(
            self.round_trips,
            (start, at),
            lambda: RoundTrip(start, rule=upcast.rule, dtype=upcast.dtype, back=at),
        )
        if trip is not None:
            trip.times += 1
            trip.is_used |= upcast.is_used
            upcast.uses.append(trip)
            trip.add(cast.seconds + upcast.seconds, cast.bytes + upcast.bytes, self.step)


def _rounded_limit(limit: float, dtype: torch.dtype) -> int | None:
    """Return 0, 1 or -1 if a limit is rounded to it; None if it is not, or is that number itself."""
    limits = torch.finfo(dtype)
    if 0 < abs(limit) <= limits.smallest_normal * limits.eps / 2:
        return 0
    return int(math.copysign(1, limit)) if 0 < 1 - abs(limit) <= limits.eps / 4 else None


def _different(values: Tensor) -> Tensor:
    """Return the number of different values in a sorted tensor, without waiting for the device."""
    return (values[1:] != values[:-1]).sum() + min(1, values.numel())


class RecastWeights:
    """The weights that were cast to 16 bits."""

    def __init__(self) -> None:
        self._casts: dict[object, RepeatedCast] = {}
        self._numbers = WeakIdKeyDictionary()
        """A unique number for each weight, because Python reuses ids."""
        self._free_numbers = itertools.count()
        self.step = 0
        """The number of optimizer steps, which may write weights without a change of their version counters."""

    def __iter__(self) -> Iterator[RepeatedCast]:
        return iter(list(self._casts.values()))

    def saw(self, at: FindingLocation, cast: Cast, region: int | None) -> None:
        """Record a cast to 16 bits at a site, if the tensor is a weight or a view of one.

        `region` is the number of the current outermost region.
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
        holdable = base is None and (not source.requires_grad or is_held_in_training(source))
        entry = _bounded(
            self._casts,
            key,
            lambda: RepeatedCast(at, shape=shape, dtype=dtype_name(dtype), holdable=holdable),
        )
        if entry is None:
            return
        entry.casts += 1
        has_memory = _torch.is_plain(type(weight)) and weight.layout is torch.strided
        latest = (
            _torch.version_if_counted(weight),
            weight.data_ptr() if has_memory else 0,
            self.step,
        )
        if entry.latest == latest:
            entry.again += 1
            entry.is_in_one_region |= region is not None and region == entry.region
            entry.add(cast.seconds, cast.bytes, self.step)
        entry.latest, entry.region = latest, region


def _bounded(entries: dict[object, _T], key: object, make: Any) -> _T | None:
    entry = entries.get(key)
    if entry is None and len(entries) < MOST:
        entry = entries[key] = make()
    return entry
