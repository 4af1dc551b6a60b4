"""Recorder of the operations of a step in float32, which builds a program from them.

Invariants:
- a tensor's producer is found by its memory. So a view leads to the operation that wrote its numbers, and the argument
  of an operation in place keeps its producer;
- no tensor of the step is kept, and an entry for memory ends when the memory is freed.
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
from precast.tuning.calls import is_castable, replace_all, replace_tensors, tensors_in_order
from precast.tuning.listener import ObservedCall
from precast.tuning.probing import ProbeResult, probe
from precast.tuning.sites import (
    CallRecord,
    OperationSite,
    TensorArgument,
    TensorEdge,
    TunedProgram,
)

__all__ = ["ProgramRecorder"]

_PASSES_ON: Final = frozenset(
    {"_to_copy", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"}
    | {"randint_like", "new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"}
)
"""Operations whose result has the dtype of their first tensor, and which need no row."""
_CHANGES_VIEW: Final = frozenset(
    {"as_strided_", "detach_", "resize_", "set_", "squeeze_", "swapaxes_", "t_", "transpose_"}
    | {"unsqueeze_"}
)
"""Operations in place that change the view of a tensor, and no numbers."""
_Key = tuple[str | None, str]
"""A site's module and operation."""


@dataclass(frozen=True, slots=True)
class _TensorSource:
    """The origin of a tensor of a call."""

    producer: _Key | None
    elements: int
    dtype: torch.dtype | None
    weight: str
    is_written: bool
    needs_grad: bool


@dataclass
class _CallCounts:
    """One kind of call of a site, with its counts and the origins of its tensors."""

    call: CallRecord
    repeated: int = 0
    count: int = 0
    sources: list[Counter[_TensorSource]] = field(default_factory=list)


class ProgramRecorder:
    """Records the operations of a step in float32; its methods are the callbacks of a `SiteListener`."""

    def __init__(self, model: nn.Module) -> None:
        self._calls: dict[_Key, dict[object, _CallCounts]] = {}
        self._pinned: set[_Key] = set()
        self._writes: set[_Key] = set()
        self._makers: dict[int, tuple[weakref.ref[Any], _Key]] = {}
        storages = [(name, _storage(parameter)) for name, parameter in named_parameters(model)]
        self._weights = {id(storage): name for name, storage in storages}
        self._alive = [storage for _, storage in storages]
        self._sources: list[_TensorSource] | None = None

    def before(self, call: ObservedCall) -> None:
        """Record the origins of the arguments, which an operation in place may change."""
        self._sources = None if call.is_view else self._sources_of(call)

    def after(self, call: ObservedCall, out: Any) -> None:
        """Record a call and its results."""
        sources, key = self._sources, call.key
        tensors = tensors_in_order(call.args, call.kwargs)
        castable = [tensor for tensor in tensors if is_castable(tensor.dtype)]
        results = [t for t in tensors_in_order((out,), {}) if is_castable(t.dtype)]
        if sources is None or not castable or not results or key[1] in _CHANGES_VIEW:
            return
        if key[1] in _PASSES_ON:
            maker = self._maker(castable[0])
            if maker is not None and results[0].dtype is castable[0].dtype:
                self._set_maker(results[0], maker)
            return
        inputs = {id(tensor) for tensor in tensors}
        writes = any(source.is_written for source in sources)
        if not writes and _memory(results) <= _memory(castable):
            return  # a view that is not declared as one, such as `_unsafe_view`
        if writes and not any(id(result) in inputs for result in results):
            self._writes.add(key)
            sources = [replace(source, is_written=False) for source in sources]
        self._add_call(call, tensors, sources)
        for result in results:
            if id(result) not in inputs:
                self._set_maker(result, key)

    def program(
        self, modules: tuple[str, ...], base: Policy, low: torch.dtype, device: str
    ) -> TunedProgram:
        """Return the program, with the rules of the base policy and the effects of 16-bit arguments."""
        rules, _ = base.expand(device)
        sites: dict[_Key, OperationSite] = {}
        probes: dict[object, ProbeResult] = {}
        for key, kinds in self._calls.items():
            for kind, counts in kinds.items():
                if kind not in probes:
                    probes[kind] = _probe(counts, low, device)
            results = [probes[kind] for kind in kinds]
            overload = next(iter(kinds.values())).call.overload
            rule = _casting_rule(rules.get(overload), overload, device)
            sites[key] = OperationSite(
                *key,
                rule=rule,
                barred=next((each.barred for each in results if each.barred), ""),
                casts_down=key not in self._writes and not any(each.writes for each in results),
                pinned=key in self._pinned,
                calls=tuple(
                    _finished_call(counts, probes[kind], rule is Rule.LOWER)
                    for kind, counts in kinds.items()
                ),
            )
        edges = Counter[TensorEdge]()
        for key, kinds in self._calls.items():
            for kind, counts in kinds.items():
                for edge, count in _edges(sites, sites[key], counts, probes[kind]):
                    edges[edge] += count
        all_edges = tuple(replace(edge, count=count) for edge, count in edges.items())
        return TunedProgram(tuple(sites.values()), all_edges, low, device, modules)

    def _add_call(
        self, call: ObservedCall, tensors: list[Tensor], sources: list[_TensorSource]
    ) -> None:
        if call.is_pinned and not call.is_repeated:
            self._pinned.add(call.key)
        record = self._record(call)
        kind = (record.overload, record.args, tuple(record.kwargs.items()))
        kinds = self._calls.setdefault(call.key, {})
        try:
            counts = kinds.get(kind)
        except TypeError:  # an argument that cannot be hashed, such as a script object
            return
        if counts is None:
            counts = _CallCounts(
                _with_ranges(record, tensors), sources=[Counter() for _ in tensors]
            )
            kinds[kind] = counts
        if call.is_repeated:
            counts.repeated += 1
            return
        counts.count += 1
        for counter, source in zip(counts.sources, sources, strict=True):
            counter[source] += 1

    def _record(self, call: ObservedCall) -> CallRecord:
        def describe(tensor: Tensor) -> TensorArgument:
            return TensorArgument(
                tuple(tensor.shape),
                tuple(tensor.stride()),
                tensor.dtype,
                is_weight=bool(self._weight(tensor)),
                needs_grad=tensor.requires_grad and torch.is_grad_enabled(),
            )

        args = tuple(replace_all(value, describe, Tensor) for value in call.args)
        kwargs = {name: replace_all(value, describe, Tensor) for name, value in call.kwargs.items()}
        return CallRecord(call.overload, args, kwargs)

    def _sources_of(self, call: ObservedCall) -> list[_TensorSource]:
        targets = _written_tensors(call)
        return [
            self._source(tensor, id(tensor) in targets)
            for tensor in tensors_in_order(call.args, call.kwargs)
        ]

    def _source(self, tensor: Tensor, is_written: bool) -> _TensorSource:
        maker = self._maker(tensor)
        dtype = tensor.dtype if maker is None else None
        needs_grad = tensor.requires_grad and torch.is_grad_enabled()
        return _TensorSource(
            maker, tensor.numel(), dtype, self._weight(tensor), is_written, needs_grad
        )

    def _weight(self, tensor: Tensor) -> str:
        storage = _storage(tensor)
        return "" if storage is None else self._weights.get(id(storage), "")

    def _maker(self, tensor: Tensor) -> _Key | None:
        storage = _storage(tensor)
        entry = None if storage is None else self._makers.get(id(storage))
        return entry[1] if entry is not None and entry[0]() is storage else None

    def _set_maker(self, tensor: Tensor, key: _Key) -> None:
        storage = _storage(tensor)
        if storage is not None:
            self._makers[id(storage)] = weakref.ref(storage), key


def _casting_rule(entry: Entry | None, overload: str, device: str) -> Rule | None:
    """Return the rule that casts; `promote` casts operations without a kernel in PyTorch only where they raise."""
    if entry is None:
        return None
    torch_rules, _ = Policy.load("torch").expand(device)
    return entry.rule if entry.rule is not Rule.PROMOTE or overload in torch_rules else None


def _probe(counts: _CallCounts, low: torch.dtype, device: str) -> ProbeResult:
    outside = {
        i
        for i, sources in enumerate(counts.sources)
        if all(source.producer is None for source in sources)
    }
    return probe(counts.call, outside, low, device)


def _finished_call(counts: _CallCounts, probed: ProbeResult, is_lowered: bool) -> CallRecord:
    """Return the call with its counts; arguments that decide nothing keep their dtype if no rule casts them."""
    decides = iter(probed.decides)

    def mark(argument: TensorArgument) -> TensorArgument:
        is_free = not next(decides) and is_castable(argument.dtype)
        return replace(argument, stays=is_free and not is_lowered)

    args, kwargs = replace_tensors(counts.call, mark)
    return CallRecord(counts.call.overload, args, kwargs, counts.count, counts.repeated)


def _edges(
    sites: Mapping[_Key, OperationSite],
    consumer: OperationSite,
    counts: _CallCounts,
    probed: ProbeResult,
) -> Iterator[tuple[TensorEdge, int]]:
    for decides, sources in zip(probed.decides, counts.sources, strict=True):
        for source, count in sources.items():
            if source.dtype is not None and not is_castable(source.dtype):
                continue
            producer = None if source.producer is None else sites.get(source.producer)
            edge = TensorEdge(
                producer,
                consumer,
                source.elements,
                dtype=source.dtype if producer is not None or source.dtype else torch.float32,
                weight=source.weight,
                decides=decides,
                is_written=source.is_written,
                needs_grad=source.needs_grad,
            )
            yield edge, count


def _written_tensors(call: ObservedCall) -> set[int]:
    """Return the ids of the tensors that an operation declares to write to."""
    overload = _torch.find_overload(call.overload)
    if overload is None:
        return set()
    arguments = _torch.schema_of(overload).arguments
    values = {a.name: value for a, value in zip(arguments, call.args, strict=False)} | call.kwargs
    names = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return {id(t) for name in names for t in tensors_in_order((values.get(name),), {})}


def _with_ranges(call: CallRecord, tensors: list[Tensor]) -> CallRecord:
    """Return the call with the range of the numbers in each tensor."""
    remaining = iter(tensors)

    def add_range(argument: TensorArgument) -> TensorArgument:
        low, high = _range(next(remaining))
        return replace(argument, low=low, high=high)

    args, kwargs = replace_tensors(call, add_range)
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


def _storage(tensor: Tensor) -> Any:
    if not _torch.is_plain(type(tensor)) or tensor.layout is not torch.strided:
        return None
    return tensor.untyped_storage()
