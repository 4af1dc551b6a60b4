"""Recorder of the operations of a step in float32, which builds a program from them.

Invariants:
- a tensor's producer is found by its memory. So a view leads to the operation that wrote its numbers, and the argument
  of an operation in place keeps its producer;
- no tensor of the step is kept, and an entry for memory ends when the memory is freed.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from precast import _torch
from precast._internal.display import dtype_name
from precast.policy.module_names import named_parameters
from precast.policy.policy import Policy, Rule, expanded_rules
from precast.policy.rows import Entry
from precast.tuning.listener import ObservedCall, SiteListener
from precast.tuning.sites import (
    CallRecord,
    OperationSite,
    TensorArgument,
    TensorEdge,
    TunedProgram,
    first_floating,
    is_castable,
    record_call,
    tensors_in_order,
)

__all__ = ["ProgramRecorder"]

_LONGEST: Final = 120
"""The most characters of an error in a reason."""
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


@dataclass
class _CallCounts:
    """One kind of call of a site, with its counts and the origins of its tensors."""

    call: CallRecord
    sources: list[Counter[TensorEdge]]
    repeated: int = 0
    count: int = 0

    def probe(self, low: torch.dtype, device: str) -> _ProbeResult:
        """Return the effect of 16-bit arguments; tensors that no operation made may stay float32."""
        outside = {
            i
            for i, sources in enumerate(self.sources)
            if all(source.producer is None for source in sources)
        }
        return _probe(self.call, outside, low, device)

    def record(self, probed: _ProbeResult, *, is_lowered: bool) -> CallRecord:
        """Return the call with its counts; arguments that decide nothing keep their dtype if no rule casts them."""
        tensors = tuple(
            replace(each, stays=not decides and is_castable(each.dtype) and not is_lowered)
            for each, decides in zip(self.call.tensors, probed.decides, strict=True)
        )
        return replace(self.call, tensors=tensors, count=self.count, recomputed=self.repeated)


class ProgramRecorder(SiteListener):
    """Records the operations of a step in float32."""

    def __init__(self, model: nn.Module, device: str, ruled: Collection[str]) -> None:
        super().__init__(model, device, ruled)
        self._calls: dict[OperationSite, dict[CallRecord, _CallCounts]] = {}
        self._pinned: set[OperationSite] = set()
        self._writes: set[OperationSite] = set()
        self._makers: dict[int, tuple[weakref.ref[Any], OperationSite]] = {}
        storages = [(name, _storage(parameter)) for name, parameter in named_parameters(model)]
        self._weights = {id(storage): name for name, storage in storages}
        self._alive = [storage for _, storage in storages]
        self._sources: list[TensorEdge] | None = None

    def before(self, call: ObservedCall) -> None:
        """Record the origins of the arguments, which an operation in place may change."""
        self._sources = None if call.is_view else self._sources_of(call)

    def after(self, call: ObservedCall, out: Any) -> None:
        """Record a call and its results."""
        sources, site = self._sources, call.site
        tensors = tensors_in_order(call.args, call.kwargs)
        castable = [tensor for tensor in tensors if is_castable(tensor.dtype)]
        results = [t for t in tensors_in_order((out,), {}) if is_castable(t.dtype)]
        if sources is None or not castable or not results or site.op in _CHANGES_VIEW:
            return
        if site.op in _PASSES_ON:
            maker = self._maker(castable[0])
            if maker is not None and results[0].dtype is castable[0].dtype:
                self._set_maker(results[0], maker)
            return
        inputs = {id(tensor) for tensor in tensors}
        writes = any(source.is_written for source in sources)
        if not writes and _memory(results) <= _memory(castable):
            return  # a view that is not declared as one, such as `_unsafe_view`
        if writes and not any(id(result) in inputs for result in results):
            self._writes.add(site)
            sources = [replace(source, is_written=False) for source in sources]
        self._add_call(call, tensors, sources)
        for result in results:
            if id(result) not in inputs:
                self._set_maker(result, site)

    def program(self, base: Policy, low: torch.dtype, *, is_inference: bool) -> TunedProgram:
        """Return the program, with the rules of the base policy and the effects of 16-bit arguments."""
        rules, _ = expanded_rules(base, self.device)
        sites: dict[OperationSite, OperationSite] = {}
        probes: dict[CallRecord, _ProbeResult] = {}
        for site, kinds in self._calls.items():
            for kind, counts in kinds.items():
                if kind not in probes:
                    probes[kind] = counts.probe(low, self.device)
            results = [probes[kind] for kind in kinds]
            overload = next(iter(kinds)).overload
            rule = _casting_rule(rules.get(overload), overload, self.device)
            sites[site] = replace(
                site,
                rule=rule,
                barred=next((each.barred for each in results if each.barred), ""),
                casts_down=site not in self._writes and not any(each.writes for each in results),
                pinned=site in self._pinned,
                calls=tuple(
                    counts.record(probes[kind], is_lowered=rule is Rule.LOWER)
                    for kind, counts in kinds.items()
                ),
            )
        edges = Counter[TensorEdge]()
        for kinds in self._calls.values():
            for kind, counts in kinds.items():
                for edge, count in _edges(sites, counts, probes[kind]):
                    edges[edge] += count
        all_edges = tuple(replace(edge, count=count) for edge, count in edges.items())
        modules = self.modules.names
        return TunedProgram(
            tuple(sites.values()), all_edges, low, self.device, modules, is_inference
        )

    def _add_call(
        self, call: ObservedCall, tensors: list[Tensor], sources: list[TensorEdge]
    ) -> None:
        if call.is_pinned and not call.is_repeated:
            self._pinned.add(call.site)
        kind = record_call(call.overload, call.args, call.kwargs, self._describe)
        kinds = self._calls.setdefault(call.site, {})
        try:
            counts = kinds.get(kind)
        except TypeError:  # an argument that cannot be hashed, such as a script object
            return
        if counts is None:
            pairs = zip(kind.tensors, map(_range, tensors), strict=True)
            ranged = tuple(replace(each, low=low, high=high) for each, (low, high) in pairs)
            counts = _CallCounts(replace(kind, tensors=ranged), [Counter() for _ in tensors])
            kinds[kind] = counts
        if call.is_repeated:
            counts.repeated += 1
            return
        counts.count += 1
        for counter, source in zip(counts.sources, sources, strict=True):
            counter[source] += 1

    def _describe(self, tensor: Tensor) -> TensorArgument:
        return TensorArgument(
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.dtype,
            is_weight=bool(self._weight(tensor)),
            needs_grad=tensor.requires_grad and torch.is_grad_enabled(),
        )

    def _sources_of(self, call: ObservedCall) -> list[TensorEdge]:
        consumer, targets = call.site, _written_tensors(call)
        return [
            TensorEdge(
                maker := self._maker(tensor),
                consumer,
                tensor.numel(),
                dtype=tensor.dtype if maker is None else None,
                weight=self._weight(tensor),
                is_written=id(tensor) in targets,
                needs_grad=tensor.requires_grad and torch.is_grad_enabled(),
            )
            for tensor in tensors_in_order(call.args, call.kwargs)
        ]

    def _weight(self, tensor: Tensor) -> str:
        storage = _storage(tensor)
        return "" if storage is None else self._weights.get(id(storage), "")

    def _maker(self, tensor: Tensor) -> OperationSite | None:
        storage = _storage(tensor)
        entry = None if storage is None else self._makers.get(id(storage))
        return entry[1] if entry is not None and entry[0]() is storage else None

    def _set_maker(self, tensor: Tensor, maker: OperationSite) -> None:
        storage = _storage(tensor)
        if storage is not None:
            self._makers[id(storage)] = weakref.ref(storage), maker


def _casting_rule(entry: Entry | None, overload: str, device: str) -> Rule | None:
    """Return the rule that casts; `promote` casts operations without a kernel in PyTorch only where they raise."""
    if entry is None:
        return None
    torch_rules, _ = expanded_rules(Policy.load("torch"), device)
    return entry.rule if entry.rule is not Rule.PROMOTE or overload in torch_rules else None


def _edges(
    sites: Mapping[OperationSite, OperationSite], counts: _CallCounts, probed: _ProbeResult
) -> Iterator[tuple[TensorEdge, int]]:
    for decides, sources in zip(probed.decides, counts.sources, strict=True):
        for source, count in sources.items():
            if source.dtype is not None and not is_castable(source.dtype):
                continue
            producer = None if source.producer is None else sites.get(source.producer)
            is_lost = producer is None and source.dtype is None
            edge = replace(
                source,
                producer=producer,
                consumer=sites[source.consumer],
                dtype=torch.float32 if is_lost else source.dtype,
                decides=decides,
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


# --- effects of 16-bit arguments ---


@dataclass(frozen=True)
class _ProbeResult:
    """The effect of 16-bit arguments on one kind of call.

    Attributes:
        barred: why it cannot run in 16 bits; "" if it can.
        writes: True if it writes to arguments that it does not return.
        decides: for each tensor of the call, True if the dtype of the result follows it.
    """

    barred: str
    writes: bool
    decides: tuple[bool, ...]


def _probe(
    call: CallRecord, outside: Collection[int], low: torch.dtype, device: str
) -> _ProbeResult:
    """Call an operation outside of all regions on random tensors in 16 bits, and in mixtures with float32.

    `outside` are the positions, among its tensors, of those that no operation made, such as weights; they may stay
    float32.
    """
    positions = range(len(call.tensors))
    floating = {i for i in positions if is_castable(call.tensors[i].dtype)}
    error, dtype, writes = _try_call(call, floating, low, device)
    barred, free = "", set[int]()
    if error:
        float32_error, _, writes = _try_call(call, set(), low, device)
        # A call that refuses random numbers in float32 too is not excluded.
        barred = "" if float32_error else f"raises in {dtype_name(low)}: {error}"
    elif dtype is not low:
        barred = f"gives {dtype_name(dtype)} for inputs of any dtype"
    else:  # tensors that may be float32 beside 16-bit ones without making the result float32
        scalars = {i for i in floating if not call.tensors[i].shape}
        weights = floating & set(outside)
        for tensors in (weights | scalars, weights, scalars):
            if tensors and tensors != floating and not free:
                error, dtype, _ = _try_call(call, floating - tensors, low, device)
                free = set() if error or dtype is not low else tensors
    return _ProbeResult(barred, writes, tuple(i in floating - free for i in positions))


def _try_call(
    call: CallRecord, lowered: Collection[int], low: torch.dtype, device: str
) -> tuple[str, torch.dtype | None, bool]:
    """Return the error or "", the dtype of the result, and True if it wrote to arguments that it did not return."""
    function = _torch.find_overload(call.overload)
    assert function is not None, f"{call.overload} was recorded"
    args, kwargs = call.random_arguments(
        lambda i, argument: low if i in lowered else argument.dtype,
        torch.Generator(device).manual_seed(0),
    )
    tensors = tensors_in_order(args, kwargs)
    before = [tensor.detach().clone() for tensor in tensors]
    try:
        with torch.no_grad(), torch.random.fork_rng([]):
            result = function(*args, **kwargs)
    except Exception as error:  # an operation may raise anything
        return str(error).partition("\n")[0][:_LONGEST] or type(error).__name__, None, False
    first = first_floating(result)
    returned = {id(tensor) for tensor in tensors_in_order((result,), {})}
    writes = any(
        id(tensor) not in returned and not _are_equal(tensor, old)
        for tensor, old in zip(tensors, before, strict=True)
    )
    return "", None if first is None else first.dtype, writes


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors have the same numbers; NaN equals itself here."""
    return torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))
