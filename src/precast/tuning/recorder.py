"""Is told of every operation of a step in float32, and makes a program of what it was told.

Invariants:

- a tensor's producer is found by its memory, so views lead to the operation that wrote what they show, and what an
  operation in place writes to keeps its producer;
- no tensor of the step is kept; what is known of memory is forgotten when it is freed.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from precast import _torch
from precast.policy.module_names import named_parameters
from precast.policy.policy import Policy, Rule
from precast.policy.rows import Entry
from precast.tuning.calls import is_castable, replaced, tensors_in_order
from precast.tuning.probing import Probed, probe
from precast.tuning.sites import Argument, Call, Edge, Program, Site
from precast.tuning.watching import Happening, bare_name

__all__ = ["Recorder"]

_PASSES_ON: Final = frozenset(
    {"_to_copy", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"}
    | {"randint_like", "new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"}
)
"""Operations whose result has the dtype of their first tensor, and for which no row is needed."""
_CHANGES_VIEW: Final = frozenset(
    {"as_strided_", "detach_", "resize_", "set_", "squeeze_", "swapaxes_", "t_", "transpose_"}
    | {"unsqueeze_"}
)
"""Operations in place that change what a tensor shows, and no numbers."""
_Key = tuple[str | None, str]
"""A site's module and operation."""


@dataclass(frozen=True, slots=True)
class _Flow:
    """Where a tensor of a call comes from."""

    producer: _Key | None
    elements: int
    dtype: torch.dtype | None
    weight: str
    is_written: bool
    needs_grad: bool


@dataclass
class _Seen:
    """One kind of call of a site."""

    call: Call
    again: int = 0
    count: int = 0
    flows: list[Counter[_Flow]] = field(default_factory=list)


class Recorder:
    """Is told of every operation of a step in float32."""

    def __init__(self, model: nn.Module) -> None:
        self._seen: dict[_Key, dict[object, _Seen]] = {}
        self._pinned: set[_Key] = set()
        self._writes: set[_Key] = set()
        self._makers: dict[int, tuple[weakref.ref[Any], _Key]] = {}
        self._weights = {id(s): name for name, s in _storages(model)}
        self._alive = [storage for _, storage in _storages(model)]
        self._flows: list[_Flow] | None = None

    def before(self, happening: Happening) -> None:
        """Notes where the arguments come from, as an operation in place may have changed that when it ends."""
        self._flows = None if happening.is_view else self._flowing(happening)

    def after(self, happening: Happening, out: Any) -> None:
        """Notes a call, and what it made."""
        flows, key = self._flows, (happening.module, bare_name(happening.overload))
        tensors = tensors_in_order(happening.args, happening.kwargs)
        castable = [tensor for tensor in tensors if is_castable(tensor.dtype)]
        results = [t for t in tensors_in_order((out,), {}) if is_castable(t.dtype)]
        if flows is None or not castable or not results or key[1] in _CHANGES_VIEW:
            return
        if key[1] in _PASSES_ON:
            self._pass_on(castable[0], results[0])
            return
        given = {id(tensor) for tensor in tensors}
        written = {flow.is_written for flow in flows}
        if True not in written and _memory(results) <= _memory(castable):
            return  # a view that does not say so, such as `_unsafe_view`
        if True in written and not any(id(result) in given for result in results):
            self._writes.add(key)
            flows = [replace(flow, is_written=False) for flow in flows]
        self._note(key, happening, tensors, flows)
        for result in results:
            if id(result) not in given:
                self._put(result, key)

    def program(
        self, modules: tuple[str, ...], base: Policy, low: torch.dtype, device: str
    ) -> Program:
        """What has been seen."""
        rules, _ = base.expand(device)
        sites: dict[_Key, Site] = {}
        probed: dict[object, Probed] = {}
        for key, kinds in self._seen.items():
            results = [
                probed.get(kind) or probed.setdefault(kind, _probed(seen, low, device))
                for kind, seen in kinds.items()
            ]
            overload = next(iter(kinds.values())).call.overload
            rule = _rule(rules.get(overload), overload, device)
            sites[key] = Site(
                *key,
                rule=rule,
                barred=next((each.barred for each in results if each.barred), ""),
                casts_down=key not in self._writes and not any(each.writes for each in results),
                pinned=key in self._pinned,
                calls=tuple(
                    _finished(seen, probed[kind], rule is Rule.LOWER)
                    for kind, seen in kinds.items()
                ),
            )
        edges = Counter[Edge]()
        for key, kinds in self._seen.items():
            for kind, seen in kinds.items():
                for edge, count in _edges(sites, sites[key], seen, probed[kind]):
                    edges[edge] += count
        listed = tuple(replace(edge, count=count) for edge, count in edges.items())
        return Program(tuple(sites.values()), listed, low, device, modules)

    def _note(
        self, key: _Key, happening: Happening, tensors: list[Tensor], flows: list[_Flow]
    ) -> None:
        if happening.is_pinned and not happening.is_again:
            self._pinned.add(key)
        call = self._call(happening)
        kind = (call.overload, call.args, tuple(call.kwargs.items()))
        kinds = self._seen.setdefault(key, {})
        try:
            seen = kinds.get(kind)
        except TypeError:  # an argument that cannot be hashed, such as a script object
            return
        if seen is None:
            ranged = _with_ranges(call, tensors)
            seen = kinds[kind] = _Seen(ranged, flows=[Counter() for _ in flows])
        if happening.is_again:
            seen.again += 1
            return
        seen.count += 1
        for counter, flow in zip(seen.flows, flows, strict=True):
            counter[flow] += 1

    def _call(self, happening: Happening) -> Call:
        def plain(tensor: Tensor) -> Argument:
            return Argument(
                tuple(tensor.shape),
                tuple(tensor.stride()),
                tensor.dtype,
                is_weight=bool(self._weight(tensor)),
                needs_grad=tensor.requires_grad and torch.is_grad_enabled(),
            )

        args = tuple(replaced(value, plain, Tensor) for value in happening.args)
        kwargs = {name: replaced(value, plain, Tensor) for name, value in happening.kwargs.items()}
        return Call(happening.overload, args, kwargs)

    def _flowing(self, happening: Happening) -> list[_Flow]:
        written = _written(happening)
        return [
            self._flow(tensor, id(tensor) in written)
            for tensor in tensors_in_order(happening.args, happening.kwargs)
        ]

    def _flow(self, tensor: Tensor, is_written: bool) -> _Flow:
        maker, weight = self._maker(tensor), self._weight(tensor)
        dtype = tensor.dtype if maker is None else None
        needs_grad = tensor.requires_grad and torch.is_grad_enabled()
        return _Flow(maker, tensor.numel(), dtype, weight, is_written, needs_grad)

    def _weight(self, tensor: Tensor) -> str:
        storage = _storage(tensor)
        return "" if storage is None else self._weights.get(id(storage), "")

    def _maker(self, tensor: Tensor) -> _Key | None:
        storage = _storage(tensor)
        known = None if storage is None else self._makers.get(id(storage))
        return known[1] if known is not None and known[0]() is storage else None

    def _put(self, tensor: Tensor, key: _Key) -> None:
        storage = _storage(tensor)
        if storage is not None:
            self._makers[id(storage)] = weakref.ref(storage), key

    def _pass_on(self, source: Tensor, result: Tensor) -> None:
        maker = self._maker(source)
        if maker is not None and result.dtype is source.dtype:
            self._put(result, maker)


def _rule(entry: Entry | None, overload: str, device: str) -> Rule | None:
    """The rule that casts; `promote` casts an operation for which PyTorch has no kernel only where that raises."""
    if entry is None:
        return None
    torchs, _ = Policy.load("torch").expand(device)
    return entry.rule if entry.rule is not Rule.PROMOTE or overload in torchs else None


def _probed(seen: _Seen, low: torch.dtype, device: str) -> Probed:
    given = {
        i for i, flows in enumerate(seen.flows) if all(flow.producer is None for flow in flows)
    }
    return probe(seen.call, given, low, device)


def _finished(seen: _Seen, probed: Probed, is_lowered: bool) -> Call:
    """The call with how often it was made; arguments that decide nothing stay as they are, if no rule casts them."""
    decides = iter(probed.decides)

    def marked(argument: Argument) -> Argument:
        free = not next(decides) and is_castable(argument.dtype)
        return replace(argument, stays=free and not is_lowered)

    args = tuple(replaced(value, marked, Argument) for value in seen.call.args)
    kwargs = {name: replaced(value, marked, Argument) for name, value in seen.call.kwargs.items()}
    return Call(seen.call.overload, args, kwargs, seen.count, seen.again)


def _edges(
    sites: Mapping[_Key, Site], consumer: Site, seen: _Seen, probed: Probed
) -> Iterator[tuple[Edge, int]]:
    for decides, flows in zip(probed.decides, seen.flows, strict=True):
        for flow, count in flows.items():
            if flow.dtype is not None and not is_castable(flow.dtype):
                continue
            producer = None if flow.producer is None else sites.get(flow.producer)
            dtype = flow.dtype if producer is not None or flow.dtype else torch.float32
            yield (
                Edge(
                    producer,
                    consumer,
                    flow.elements,
                    dtype=dtype,
                    weight=flow.weight,
                    decides=decides,
                    is_written=flow.is_written,
                    needs_grad=flow.needs_grad,
                ),
                count,
            )


def _written(happening: Happening) -> set[int]:
    """The ids of the tensors that an operation says it writes to."""
    overload = _torch.find_overload(happening.overload)
    if overload is None:
        return set()
    arguments = _torch.schema_of(overload).arguments
    given = {a.name: value for a, value in zip(arguments, happening.args, strict=False)}
    given |= happening.kwargs
    names = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return {id(t) for name in names for t in tensors_in_order((given.get(name),), {})}


def _with_ranges(call: Call, tensors: list[Tensor]) -> Call:
    """The call with the range of the numbers in each tensor."""
    remaining = iter(tensors)

    def ranged(argument: Argument) -> Argument:
        low, high = _range(next(remaining))
        return replace(argument, low=low, high=high)

    args = tuple(replaced(value, ranged, Argument) for value in call.args)
    kwargs = {name: replaced(value, ranged, Argument) for name, value in call.kwargs.items()}
    return replace(call, args=args, kwargs=kwargs)


def _range(tensor: Tensor) -> tuple[float, float]:
    if tensor.numel() == 0 or tensor.dtype.is_complex:
        return 0.0, 1.0
    with _torch.without_dispatch(), torch.no_grad():
        values = tensor.detach()
        if values.dtype.is_floating_point:
            values = values[torch.isfinite(values)]
        if values.numel() == 0:
            return 0.0, 0.0
        low, high = torch.aminmax(values)
        return float(low), float(high)


def _memory(tensors: list[Tensor]) -> set[int]:
    return {id(_storage(tensor)) for tensor in tensors}


def _storages(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name, _storage(parameter)) for name, parameter in named_parameters(model)]


def _storage(tensor: Tensor) -> Any:
    if not _torch.is_plain(type(tensor)) or tensor.layout is not torch.strided:
        return None
    return tensor.untyped_storage()
