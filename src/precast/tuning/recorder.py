"""Recording of one training step, or one run, of a model as a program of operations.

Invariants:
- an operation inside one that has an autocast kernel belongs to that one, because a rule acts on the outer one;
- operations of the backward pass are left out, apart from those that a checkpoint repeats;
- a module's name is the first of its names; modules that are not the model's do not count;
- copies of the model run, first in float32; the model, its gradients and PyTorch's random state do not change;
- a tensor's producer is found by its memory. So a view leads to the operation that wrote its numbers, and the argument
  of an operation in place keeps its producer. No tensor is kept, and an entry for memory ends when it is freed;
- an operation that cannot run in 16 bits at its place in the program is found by running the program so, and excluded
  with the reason.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from precast import _torch
from precast._internal.display import dtype_name
from precast._internal.pytree import tensors_in
from precast._torch import storage_of, storage_sizes
from precast.attachment.attachment import attach
from precast.autocast_mode.region import autocast
from precast.diagnostics.failures import Failures
from precast.diagnostics.tracing.call_sites import frame_above
from precast.diagnostics.tracing.listening import OperationListener, listen
from precast.engine.operation import Operation
from precast.engine.operator_kinds import Cast, kind_of
from precast.policy.module_names import modules_by_name, name_of_each, named_parameters
from precast.policy.module_plan import is_called, outwards
from precast.policy.policy import Policy, Rule, expanded_rules
from precast.policy.rows import Entry, short, split
from precast.tuning.policy_rows import explicit_policy
from precast.tuning.setups import copy_model
from precast.tuning.sites import (
    CallRecord,
    OperationSite,
    TensorArgument,
    TensorEdge,
    TunedProgram,
    first_floating,
    is_castable,
    record_call,
    written_arguments,
)

__all__ = ["record"]

Step = Callable[[nn.Module], Any]
"""Runs a model on a batch and returns the loss; called inside of a region."""

_ROUNDS: Final = 8
"""The most runs in 16 bits that look for operations to exclude."""
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


def record(
    model: nn.Module,
    step: Step,
    base: Policy,
    *,
    low: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    is_inference: bool = False,
) -> TunedProgram:
    """Run a step in float32, and as often as needed in 16 bits, and return its program.

    Copies of the model run. `step` returns the loss; it opens no region and does not call backward. `base` is the
    policy whose rules the operations have, and `low` the 16-bit dtype.
    """
    with autocast(device, dtype=low, policy=base):
        pass  # so that operations with rules in the base have kernels, which report them
    # Operations are reported as wholes if the base or PyTorch has a rule for them.
    rules, torch_rules = (expanded_rules(each, device)[0] for each in (base, Policy.load("torch")))
    ruled = rules.keys() | torch_rules.keys()
    copied = copy_model(model)
    recorder = _ProgramRecorder(copied, device, ruled)
    with autocast(device, dtype=low, policy=Policy("float32", {})):
        _run(copied, step, recorder)
    program = recorder.program(rules, torch_rules, low, is_inference=is_inference)
    for _ in range(_ROUNDS):
        barred = _unable_sites(copy_model(model), step, program, base, ruled)
        if not barred:
            break
        sites = (replace(each, barred=barred.get(each, each.barred)) for each in program.sites)
        program = replace(program, sites=tuple(sites))
    return program


def _run(model: nn.Module, step: Step, listener: _ProgramRecorder) -> None:
    """Run the forward pass inside of the open region, and the backward pass outside of it."""
    with torch.random.fork_rng(), listen(listener):
        tensor = first_floating(step(model))
        if tensor is not None and tensor.requires_grad:
            with torch.autocast(listener.device, enabled=False):
                torch.autograd.backward(tensor, torch.ones_like(tensor))


def _unable_sites(
    model: nn.Module, step: Step, program: TunedProgram, base: Policy, ruled: Collection[str]
) -> dict[OperationSite, str]:
    """Return the operations that cannot run in 16 bits at their places in the program, with the reasons."""
    listener = _ProgramRecorder(model, program.device, ruled)
    choice = program.choose(program.sites)
    policy = explicit_policy(choice, program, base)
    region = autocast(program.device, dtype=program.low, policy=policy)
    try:
        with attach(model, policy), region:
            _run(model, step, listener)
    except Exception as error:
        failed = listener.failed_call
        if failed is None or choice.get(failed.site) is not program.low:
            return {}  # the program raises by itself, as its trials will
        return {failed.site: f"raises in the program: {str(error).partition(chr(10))[0]}"}
    barred = {}
    for site in program.sites:
        actual = listener.dtypes.get(site, {program.low})
        if choice[site] is program.low and actual != {program.low}:
            names = " and ".join(sorted(map(dtype_name, actual)))
            barred[site] = f"runs in {names} in the program"
    return barred


@dataclass
class _CallCounts:
    """One kind of call of a site, with its counts and the origins of its tensors."""

    call: CallRecord
    sources: list[Counter[TensorEdge]]
    count: int = 0
    repeated: int = 0


class _ObservedCall(NamedTuple):
    """One call of an operation.

    Attributes:
        module: the name of the module that runs it; None where no module of the model does.
        overload: the dispatcher's name, such as `aten::softmax.int`.
        is_pinned: True if rules for modules around may not reach it.
        is_repeated: True if a checkpoint repeats it.
        is_view: True if its results share its arguments' memory.
    """

    module: str | None
    overload: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_pinned: bool
    is_repeated: bool
    is_view: bool = False

    @property
    def site(self) -> OperationSite:
        """The operation of the module, by its name in a policy's row, such as `softmax` for `aten::softmax.int`."""
        return OperationSite(self.module, short(split(self.overload)[0]))


class _ModuleStack:
    """Finds the module of a model that runs a frame."""

    def __init__(self, model: nn.Module) -> None:
        named = modules_by_name(model)
        self.names: Final = tuple(named)
        self._first_names = {id(module): name for name, module in name_of_each(model)}
        counts = Counter(map(id, named.values()))
        self._with_two_names = {key for key, count in counts.items() if count > 1}
        self._around = {
            name: [n for n in outwards(name) if n in named and is_called(named[n])]
            for name in named
        }

    def module_of(self, frame: FrameType | None) -> tuple[str | None, bool]:
        """Return the module that runs a frame, and True if rules for modules around may not reach it."""
        running: list[str] = []
        is_shared = False
        while frame is not None:
            if frame.f_code is _torch.MODULE_CALL:
                key = id(frame.f_locals["self"])
                name = self._first_names.get(key)
                if name is not None and (not running or running[-1] != name):
                    running.append(name)
                    is_shared |= key in self._with_two_names
            frame = frame.f_back
        if not running:
            return None, False
        return running[0], is_shared or running[1:] != self._around[running[0]]


class _ProgramRecorder(OperationListener):
    """Records the operations of a step that kernels and a dispatch mode report.

    All policies that the process has used decide which operations have kernels at the autocast keys. So that the same
    sites are recorded in any process, an operation counts as a whole only if it is in `ruled`, by the dispatcher's
    name.
    """

    def __init__(self, model: nn.Module, device: str, ruled: Collection[str]) -> None:
        self.modules = _ModuleStack(model)
        self.device = device
        self.failures = Failures()
        self.failed_call: _ObservedCall | None = None
        """The first operation that has raised an error."""
        self.dtypes: dict[OperationSite, set[torch.dtype]] = {}
        """The dtypes of the first result of each operation."""
        self._ruled = ruled
        self._kernels: list[_ObservedCall | None] = []
        """The call of each kernel that runs; None if it is not reported."""
        self._open = 0
        """The number of reported kernels that run, and of records, whose operations are not the program's."""
        self._calls: dict[OperationSite, dict[CallRecord, _CallCounts]] = {}
        self._pinned: set[OperationSite] = set()
        self._writes: set[OperationSite] = set()
        self._makers: dict[int, tuple[weakref.ref[Any], OperationSite]] = {}
        """The operation that wrote the numbers of a storage, by its id."""
        storages = [(storage_of(parameter), name) for name, parameter in named_parameters(model)]
        self._weights = {id(each): (each, name) for each, name in storages if each is not None}
        self._sources: list[TensorEdge] = []

    @property
    def depth(self) -> int:
        return self._open

    def casting_here(self) -> list[str]:
        return [] if self._open or _torch.current_node() is not None else [self.device]

    def begin(self, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Handle the start of a kernel at an autocast key, which another policy may have put there."""
        call = None
        if op.name in self._ruled and not self._open:
            call = self._observe(op.name, args, kwargs)
        if call is not None:
            self._before(call)
            self._open += 1
        self._kernels.append(call)

    def end(self, result: Any) -> None:
        if call := self._kernels.pop():
            try:
                self._after(call, result)
            finally:
                self._open -= 1

    def fail(self, _error: BaseException) -> None:
        if call := self._kernels.pop():
            self._open -= 1
            self.failed_call = self.failed_call or call

    def saw(self, func: Any, call: Any, out: Any, _seconds: float, _inside: Sequence[Cast]) -> None:
        observed = None if self._open else self._observe(_dispatcher_name(func), *call)
        if observed is not None:
            observed = observed._replace(is_view=kind_of(func).is_view)
            self._before(observed)
            self._open += 1
            try:
                self._after(observed, out)
            finally:
                self._open -= 1

    def failed(self, func: Any, call: Any, _error: BaseException) -> None:
        if not self._open and self.failed_call is None:
            self.failed_call = self._observe(_dispatcher_name(func), *call)

    def _observe(
        self, overload: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _ObservedCall | None:
        module, is_pinned = self.modules.module_of(frame_above(1))
        in_backward = _torch.current_node() is not None
        if in_backward and module is None:
            return None
        return _ObservedCall(module, overload, args, kwargs, is_pinned, in_backward)

    def _before(self, call: _ObservedCall) -> None:
        """Record the origins of the arguments, which an operation in place may change."""
        self._sources = [] if call.is_view else self._sources_of(call)

    def _after(self, call: _ObservedCall, out: Any) -> None:
        first = first_floating(out)
        if first is not None and not call.is_view:
            self.dtypes.setdefault(call.site, set()).add(first.dtype)
        sources, site = self._sources, call.site
        tensors = tensors_in((call.args, call.kwargs))
        castable = [tensor for tensor in tensors if is_castable(tensor.dtype)]
        results = [t for t in tensors_in(out) if is_castable(t.dtype)]
        if not (sources and castable and results) or site.op in _CHANGES_VIEW:
            return
        if site.op in _PASSES_ON:
            maker = self._maker(castable[0])
            if maker is not None and results[0].dtype is castable[0].dtype:
                self._set_maker(results[0], maker)
            return
        inputs = {id(tensor) for tensor in tensors}
        writes = any(source.is_written for source in sources)
        if not writes and storage_sizes(results).keys() <= storage_sizes(castable).keys():
            return  # a view that is not declared as one, such as `_unsafe_view`
        if writes and not any(id(result) in inputs for result in results):
            self._writes.add(site)
            sources = [replace(source, is_written=False) for source in sources]
        self._add_call(call, tensors, sources)
        for result in results:
            if id(result) not in inputs:
                self._set_maker(result, site)

    def program(
        self,
        rules: Mapping[str, Entry],
        torch_rules: Mapping[str, Entry],
        low: torch.dtype,
        *,
        is_inference: bool,
    ) -> TunedProgram:
        """Return the program, with the rules of the base policy and the effects of 16-bit arguments."""
        probes: dict[CallRecord, _Probe] = {}
        sites: dict[OperationSite, OperationSite] = {}
        for site, kinds in self._calls.items():
            for kind, counts in kinds.items():
                if kind not in probes:
                    probes[kind] = _probe(counts, low, self.device)
            overload = next(iter(kinds)).overload
            rule = rules[overload].rule if overload in rules else None
            if rule is Rule.PROMOTE and overload not in torch_rules:
                rule = None  # it casts only where the operation raises an error
            sites[site] = replace(
                site,
                rule=rule,
                barred=next((probes[kind].barred for kind in kinds if probes[kind].barred), ""),
                casts_down=not (site in self._writes or any(probes[kind].writes for kind in kinds)),
                pinned=site in self._pinned,
                calls=tuple(
                    _counted(counts, probes[kind], is_lowered=rule is Rule.LOWER)
                    for kind, counts in kinds.items()
                ),
            )
        edges = Counter[TensorEdge]()
        for kinds in self._calls.values():
            for kind, counts in kinds.items():
                for edge, count in _edges(sites, counts, probes[kind].decides):
                    edges[edge] += count
        all_edges = tuple(replace(edge, count=count) for edge, count in edges.items())
        modules = self.modules.names
        return TunedProgram(
            tuple(sites.values()), all_edges, low, self.device, modules, is_inference
        )

    def _add_call(
        self, call: _ObservedCall, tensors: list[Tensor], sources: list[TensorEdge]
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

    def _sources_of(self, call: _ObservedCall) -> list[TensorEdge]:
        arguments = written_arguments(call.overload, call.args, call.kwargs)
        targets = {id(tensor) for tensor in tensors_in(arguments)}
        return [
            TensorEdge(
                maker := self._maker(tensor),
                call.site,
                tensor.numel(),
                dtype=tensor.dtype if maker is None else None,
                weight=self._weight(tensor),
                is_written=id(tensor) in targets,
                needs_grad=tensor.requires_grad and torch.is_grad_enabled(),
            )
            for tensor in tensors_in((call.args, call.kwargs))
        ]

    def _weight(self, tensor: Tensor) -> str:
        _, name = self._weights.get(id(storage_of(tensor)), (None, ""))
        return name

    def _maker(self, tensor: Tensor) -> OperationSite | None:
        storage = storage_of(tensor)
        entry = self._makers.get(id(storage))
        return entry[1] if entry is not None and entry[0]() is storage else None

    def _set_maker(self, tensor: Tensor, maker: OperationSite) -> None:
        storage = storage_of(tensor)
        if storage is not None:
            self._makers[id(storage)] = weakref.ref(storage), maker


def _counted(counts: _CallCounts, probe: _Probe, *, is_lowered: bool) -> CallRecord:
    """Return a call with its counts; arguments that decide nothing keep their dtype if no rule casts them."""
    tensors = tuple(
        replace(each, stays=not decides and is_castable(each.dtype) and not is_lowered)
        for each, decides in zip(counts.call.tensors, probe.decides, strict=True)
    )
    return replace(counts.call, tensors=tensors, count=counts.count, recomputed=counts.repeated)


def _edges(
    sites: Mapping[OperationSite, OperationSite], counts: _CallCounts, decides: tuple[bool, ...]
) -> Iterator[tuple[TensorEdge, int]]:
    """Yield the edges of one kind of call, between the recorded sites, with their counts."""
    for is_deciding, sources in zip(decides, counts.sources, strict=True):
        for source, count in sources.items():
            if source.dtype is None or is_castable(source.dtype):
                producer = None if source.producer is None else sites.get(source.producer)
                is_lost = producer is None and source.dtype is None
                edge = replace(
                    source,
                    producer=producer,
                    consumer=sites[source.consumer],
                    dtype=torch.float32 if is_lost else source.dtype,
                    decides=is_deciding,
                )
                yield edge, count


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


def _dispatcher_name(func: Any) -> str:
    """Return the dispatcher's name: `aten.softmax.int` -> `aten::softmax.int`; the default overload has no suffix."""
    return str(func).replace(".", "::", 1).removesuffix(".default")


# --- effects of 16-bit arguments ---


class _Probe(NamedTuple):
    """The effect of 16-bit arguments on one kind of call."""

    barred: str
    """Why it cannot run in 16 bits; "" if it can."""
    writes: bool
    """True if it writes to arguments that it does not return."""
    decides: tuple[bool, ...]
    """For each tensor of the call, True if the dtype of the result follows it."""


def _probe(counts: _CallCounts, low: torch.dtype, device: str) -> _Probe:
    """Call an operation outside of all regions on random tensors in 16 bits, and in mixtures with float32."""
    call, positions = counts.call, range(len(counts.call.tensors))
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
        weights = {
            i for i in floating if all(source.producer is None for source in counts.sources[i])
        }
        for tensors in (weights | scalars, weights, scalars):
            if tensors and tensors != floating and not free:
                error, dtype, _ = _try_call(call, floating - tensors, low, device)
                free = set() if error or dtype is not low else tensors
    return _Probe(barred, writes, tuple(i in floating - free for i in positions))


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
    tensors = tensors_in((args, kwargs))
    before = [tensor.detach().clone() for tensor in tensors]
    try:
        with torch.no_grad(), torch.random.fork_rng([]):
            result = function(*args, **kwargs)
    except Exception as error:  # an operation may raise anything
        return str(error).partition("\n")[0][:_LONGEST] or type(error).__name__, None, False
    first = first_floating(result)
    returned = {id(tensor) for tensor in tensors_in(result)}
    writes = any(
        id(tensor) not in returned and not torch.equal(tensor.nan_to_num(), old.nan_to_num())
        for tensor, old in zip(tensors, before, strict=True)
    )
    return "", None if first is None else first.dtype, writes
