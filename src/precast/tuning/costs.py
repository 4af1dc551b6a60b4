"""Measurement of the cost of each operation in each dtype on this machine: time of both passes, and memory kept.

Invariants:
- equal calls are measured once, however many modules make them, those with the most work in a step first. Operations
  that there is no time for have no cost, so no dtype is preferred for them;
- the dtypes of one call are timed in turns;
- a call is made at the dispatcher, outside of regions, on random tensors of the recorded shapes, strides and ranges.
  Casts of its arguments are measured separately;
- times are those of the host, and so only right for devices that work synchronously, such as the CPU.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Final

import torch
from torch import Tensor

from precast import _torch
from precast.tuning.calls import is_castable, make_arguments, tensor_arguments, tensors_in_order
from precast.tuning.sites import CallRecord, OperationSite, TensorArgument, TunedProgram
from precast.tuning.timing import Timing, time_in_turns

__all__ = ["CallCost", "CallTrial", "ProgramCosts", "call_key", "costs_in_turns"]
__all__ += ["measure_costs", "sum_of_calls"]

_F32: Final = torch.float32
_ROUNDS: Final = 7
_SMALLEST: Final = 64
"""Elements of the smallest cast that is measured; below, a cast takes as long as its call does."""
_NOTHING: Final = Timing(0.0)


@dataclass(frozen=True)
class CallCost:
    """The cost of calls in one dtype.

    Attributes:
        forward: the time of the forward pass.
        backward: the time of the backward pass; 0 where no gradient is needed.
        kept: the bytes that autograd keeps for the backward pass, without weights. Bytes that two operations keep count
            for both. In inference, the bytes of the results.
    """

    forward: Timing = _NOTHING
    backward: Timing = _NOTHING
    kept: int = 0

    @property
    def seconds(self) -> float:
        """The time of both passes."""
        return self.forward.seconds + self.backward.seconds

    @property
    def spread(self) -> float:
        """The spread of that time, in seconds."""
        return self.forward.plus(self.backward).spread


_ByDtype = Mapping[Any, CallCost]


@dataclass(frozen=True)
class ProgramCosts:
    """The costs of the operations and casts of a program.

    Attributes:
        sites: the cost of all calls of an operation in one step, by dtype. Operations that could not be measured, as
            they refuse random numbers or there was no time, are missing.
        casts: the time of one cast by its number of elements; the key is True for casts to 16 bits.
        skipped: the number of operations that there was no time for.
    """

    sites: Mapping[OperationSite, Mapping[torch.dtype, CallCost]]
    casts: Mapping[bool, Mapping[int, Timing]] = field(default_factory=dict)
    skipped: int = 0

    def seconds(self, site: OperationSite, dtype: torch.dtype) -> float:
        """Return the time of an operation in a step; 0 where it is unknown, which prefers neither dtype."""
        costs = self.sites.get(site, {})
        return costs[dtype].seconds if len(costs) == 2 else 0.0

    def kept(self, site: OperationSite, dtype: torch.dtype) -> int:
        """Return the bytes that an operation keeps in a step."""
        costs = self.sites.get(site, {})
        return costs[dtype].kept if len(costs) == 2 else 0

    def cast(self, elements: int, *, down: bool) -> float:
        """Return the seconds of one cast; between measured sizes, on a straight line in logarithms."""
        measured = self.casts.get(down, {})
        sizes = sorted(measured)
        if not sizes or elements <= 0:
            return 0.0
        at = bisect.bisect_left(sizes, elements)
        if at == 0:
            return measured[sizes[0]].seconds
        if at == len(sizes):
            return measured[sizes[-1]].seconds * elements / sizes[-1]
        low, high = sizes[at - 1], sizes[at]
        share = math.log(elements / low) / math.log(high / low)
        one, other = (max(measured[size].seconds, 1e-12) for size in (low, high))
        return float(one ** (1 - share) * other**share)


def measure_costs(
    program: TunedProgram,
    *,
    rounds: int = _ROUNDS,
    seed: int = 0,
    deadline: float = math.inf,
    progress: Callable[[int, int, str], None] = lambda _done, _all, _what: None,
) -> ProgramCosts:
    """Measure every distinct call in float32 and in 16 bits, and casts of the sizes that the program has.

    Args:
        program: the recorded program.
        rounds: the number of times that each is timed.
        seed: of the random tensors.
        deadline: on `time.monotonic`'s clock; one call, and casts of two sizes, are measured anyway.
        progress: called before each measurement with the number of measurements made, that of all, and the next one.
    """
    calls, sizes = _distinct_calls(program), _cast_sizes(program)
    steps = len(calls) + len(sizes)
    casts: dict[bool, dict[int, Timing]] = {True: {}, False: {}}
    for done, size in enumerate(sizes):
        if done > 1 and time.monotonic() > deadline:
            break
        progress(done, steps, f"casts of {size:,} elements")
        for down, timing in _time_casts(size, program, rounds, deadline).items():
            casts[down][size] = timing
    measured: dict[object, _ByDtype] = {}
    for done, key in enumerate(calls):
        if measured and time.monotonic() > deadline:
            break
        progress(len(sizes) + done, steps, calls[key].overload)
        measured[key] = _measure_call(calls[key], program, rounds, seed, deadline)
    sites = {
        site: sum_of_calls([(call, measured.get(call_key(call), {})) for call in site.calls])
        for site in program.sites
    }
    skipped = sum(any(call_key(call) not in measured for call in s.calls) for s in program.sites)
    return ProgramCosts({site: each for site, each in sites.items() if each}, casts, skipped)


def _distinct_calls(program: TunedProgram) -> dict[object, CallRecord]:
    """Return the calls that cost the same by their keys, those with the most work in a step first."""
    calls: dict[object, CallRecord] = {}
    work: Counter[object] = Counter()
    for site in program.sites:
        for call in site.calls:
            key = call_key(call)
            calls.setdefault(key, call)
            work[key] += round(_work(call) * (call.count + call.recomputed))
    return {key: calls[key] for key, _ in work.most_common()}


def _cast_sizes(program: TunedProgram) -> list[int]:
    """Return powers of 4 from the smallest tensor that may be cast to the largest."""
    largest = max((edge.elements for edge in program.edges), default=0)
    if largest == 0:
        return []
    sizes = [_SMALLEST]
    while sizes[-1] < largest:
        sizes.append(sizes[-1] * 4)
    return sizes


def call_key(call: CallRecord) -> object:
    """Return what makes calls cost the same: everything but the ranges of their numbers and their counts."""
    shapes = tuple(
        (a.shape, a.strides, a.dtype, a.is_weight, a.needs_grad, a.stays)
        for a in tensor_arguments(call)
    )
    others = (_without_tensors(call.args), _without_tensors(tuple(call.kwargs.items())))
    return call.overload, shapes, others


def _without_tensors(value: object) -> object:
    if isinstance(value, tuple):
        return tuple(_without_tensors(each) for each in value)
    return "tensor" if dataclasses.is_dataclass(value) else value


def sum_of_calls(calls: Sequence[tuple[CallRecord, _ByDtype]]) -> dict[Any, CallCost]:
    """Return the cost of all calls of an operation in a step, by dtype; without those that one call lacks."""
    result: dict[Any, CallCost] = {}
    for key in dict.fromkeys(key for _, costs in calls for key in costs):
        if not all(key in costs for _, costs in calls):
            continue
        total = CallCost()
        for call, costs in calls:
            one = costs[key]
            total = CallCost(
                total.forward.plus(one.forward.times(call.count + call.recomputed)),
                total.backward.plus(one.backward.times(call.count)),
                total.kept + one.kept * (call.count - min(call.count, call.recomputed)),
            )
        result[key] = total
    return result


# --- one call ---


def _measure_call(
    call: CallRecord, program: TunedProgram, rounds: int, seed: int, deadline: float
) -> dict[Any, CallCost]:
    """Return the cost of one call in each dtype in which it can be made."""
    trials: dict[object, CallTrial] = {}
    with torch.random.fork_rng([]):
        for dtype in (_F32, program.low):
            trial = CallTrial(call, dtype, program.device, seed)
            if trial.works():
                trials[dtype] = trial
        return costs_in_turns(trials, rounds, deadline, is_inference=program.is_inference)


def costs_in_turns(
    trials: Mapping[Any, CallTrial],
    rounds: int = _ROUNDS,
    deadline: float = math.inf,
    *,
    is_inference: bool = False,
) -> dict[Any, CallCost]:
    """Return the costs of trials, which are timed in turns."""
    functions: dict[tuple[object, str], Callable[[], float]] = {}
    for key, trial in trials.items():
        functions[key, "forward"] = trial.forward
        functions[key, "backward"] = trial.backward
    timings = time_in_turns(functions, rounds, deadline)
    return {
        key: CallCost(
            timings[key, "forward"],
            timings[key, "backward"],
            trial.result_bytes() if is_inference else trial.kept_bytes(),
        )
        for key, trial in trials.items()
    }


class CallTrial:
    """One call on random tensors, which can be timed."""

    def __init__(
        self,
        call: CallRecord,
        dtype: torch.dtype,
        device: str,
        seed: int = 0,
        *,
        region: AbstractContextManager[object] | None = None,
    ) -> None:
        """Make the arguments.

        Args:
            call: the recorded call.
            dtype: the dtype of its arguments.
            device: the device type.
            seed: of the random numbers.
            region: a region to call it in, which casts weights; without one they have the dtype already.
        """
        generator = torch.Generator(device).manual_seed(seed)
        function = _torch.find_overload(call.overload)
        assert function is not None, f"{call.overload} was recorded"
        self._function = function
        self._region = nullcontext() if region is None else region
        arguments = tensor_arguments(call)

        def dtype_of(_: int, argument: TensorArgument) -> torch.dtype:
            is_fixed = argument.stays or (region is not None and argument.is_weight)
            return dtype if is_castable(argument.dtype) and not is_fixed else argument.dtype

        self._args, self._kwargs = make_arguments(call, dtype_of, generator)
        tensors = tensors_in_order(self._args, self._kwargs)
        self._leaves = [tensor for tensor in tensors if tensor.requires_grad]
        self._weights = {
            id(tensor.untyped_storage())
            for tensor, argument in zip(tensors, arguments, strict=True)
            if argument.is_weight
        }
        self._gradients: list[Tensor] | None = None
        self._writes = any(
            argument.alias_info is not None and argument.alias_info.is_write
            for argument in _torch.schema_of(function).arguments
        )

    def works(self) -> bool:
        """Return True if neither pass raises an error."""
        try:
            self.forward()
            self.backward()
        except Exception:  # an operation may raise anything
            return False
        return True

    def forward(self) -> float:
        """Run the forward pass; return its seconds."""
        args, kwargs = self._fresh_arguments()
        start = perf_counter()
        with self._region:
            self._function(*args, **kwargs)
        return perf_counter() - start

    def backward(self) -> float:
        """Run both passes; return the seconds of the backward pass."""
        args, kwargs = self._fresh_arguments()
        with self._region:
            result = self._function(*args, **kwargs)
        roots = [tensor for tensor in tensors_in_order((result,), {}) if tensor.requires_grad]
        if not roots:
            return 0.0
        if self._gradients is None:
            self._gradients = [torch.ones_like(root) for root in roots]
        start = perf_counter()
        torch.autograd.grad(roots, self._leaves, self._gradients, allow_unused=True)
        return perf_counter() - start

    def kept_bytes(self) -> int:
        """Return the bytes that autograd keeps, each storage once, without weights."""
        kept: dict[int, Any] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if id(storage) not in self._weights:
                kept[id(storage)] = storage
            return tensor

        args, kwargs = self._fresh_arguments()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), self._region:
            result = self._function(*args, **kwargs)
        del result
        return sum(storage.nbytes() for storage in kept.values())

    def result_bytes(self) -> int:
        """Return the bytes of its results that are not its arguments'."""
        args, kwargs = self._fresh_arguments()
        inputs = {id(tensor.untyped_storage()) for tensor in tensors_in_order(args, kwargs)}
        results = tensors_in_order((self._function(*args, **kwargs),), {})
        storages = {id(s): s for s in (tensor.untyped_storage() for tensor in results)}
        return sum(storage.nbytes() for key, storage in storages.items() if key not in inputs)

    def _fresh_arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments, or copies of them where the operation writes to them."""
        if not self._writes:
            return self._args, self._kwargs
        return _cloned(self._args), {name: _cloned(value) for name, value in self._kwargs.items()}


def _cloned(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return tuple(map(_cloned, value)) if isinstance(value, tuple) else value


def _time_casts(
    size: int, program: TunedProgram, rounds: int, deadline: float
) -> dict[bool, Timing]:
    generator = torch.Generator(program.device).manual_seed(0)
    wide = torch.randn(size, generator=generator, device=program.device)
    narrow = wide.to(program.low)

    def cast(tensor: Tensor, dtype: torch.dtype) -> None:
        tensor.to(dtype)

    functions: dict[bool, Callable[[], None]] = {
        True: functools.partial(cast, wide, program.low),
        False: functools.partial(cast, narrow, _F32),
    }
    return time_in_turns(functions, rounds, deadline)


def _work(call: CallRecord) -> float:
    """Return about how much work a call is: the multiplications of a product of matrices, or else the elements."""
    tensors = tensor_arguments(call)
    matrices = [a.shape for a in tensors if a.dtype.is_floating_point and len(a.shape) > 1]
    elements = float(sum(math.prod(argument.shape) for argument in tensors))
    if len(matrices) < 2:
        return elements
    summed = max(set(matrices[0]) & set(matrices[1]), default=1)
    return max(elements, math.prod(matrices[0]) * math.prod(matrices[1]) / max(1, summed))
