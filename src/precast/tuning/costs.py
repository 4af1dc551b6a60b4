"""Measurement of the cost of each operation in each dtype on this machine: time of both passes, and memory kept.

Invariants:
- equal calls are measured once, however many modules make them, those with the most work in a step first. Operations
  that there is no time for have no cost, so no dtype is preferred for them;
- the variants of one call are timed in the same rounds, in an order that changes from round to round, so that other
  work of the machine affects all of them alike;
- a call is made at the dispatcher on random tensors of the recorded shapes, strides and ranges;
- times are those of the host, and so only right for devices that work synchronously, such as the CPU.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from precast import _torch
from precast._internal.pytree import map_tensors, tensors_in
from precast._torch import saved_for_backward, storage_sizes
from precast.tuning.options import Objective
from precast.tuning.sites import (
    CallRecord,
    OperationSite,
    TensorArgument,
    TunedProgram,
    is_castable,
    written_arguments,
)

__all__ = ["CallCost", "CallVariant", "ProgramCosts", "distinct_calls"]
__all__ += ["measure_calls", "measure_costs", "time_in_turns"]

_F32: Final = torch.float32
_ROUNDS: Final = 7
_FEWEST_ROUNDS: Final = 3
_MOST_REPEATS: Final = 64
_SHORTEST: Final = 200e-6
"""The least seconds of a turn, about a thousand times what reading the clock takes."""
_SMALLEST: Final = 64
"""Elements of the smallest cast that is measured; below, a cast takes as long as its call does."""
_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True)
class CallCost:
    """The cost of calls in one dtype: seconds of both passes, and the bytes that autograd keeps, without weights.

    Bytes that two operations keep count for both. In inference they are those of the results.
    """

    forward: float = 0.0
    backward: float = 0.0
    kept_bytes: int = 0

    def amount(self, objective: Objective) -> float:
        """Return the seconds of both passes, or the bytes."""
        return self.forward + self.backward if objective == "time" else self.kept_bytes


@dataclass(frozen=True)
class ProgramCosts:
    """The costs of the operations and casts of a program.

    Attributes:
        sites: the cost of all calls of an operation in one step, by dtype; missing where it was not measured.
        casts: the seconds of one cast by its number of elements; the key is True for casts to 16 bits.
        skipped: the number of operations that there was no time for.
    """

    sites: Mapping[OperationSite, Mapping[torch.dtype, CallCost]]
    casts: Mapping[bool, Mapping[int, float]] = field(default_factory=dict)
    skipped: int = 0

    def amount(self, site: OperationSite, dtype: torch.dtype, objective: Objective) -> float:
        """Return the seconds or bytes of an operation; 0 where they are unknown, which prefers neither dtype."""
        costs = self.sites.get(site, {})
        return costs[dtype].amount(objective) if len(costs) == 2 else 0.0

    def cast(self, elements: int, *, down: bool) -> float:
        """Return the seconds of one cast; between measured sizes, on a straight line in logarithms."""
        measured = self.casts.get(down, {})
        if not measured or elements <= 0:
            return 0.0
        low = max((size for size in measured if size <= elements), default=min(measured))
        high = min((size for size in measured if size >= elements), default=low)
        if low >= elements or low == high:
            return measured[low] * max(1.0, elements / low)
        share = math.log(elements / low) / math.log(high / low)
        one, other = (max(measured[size], 1e-12) for size in (low, high))
        return float(one ** (1 - share) * other**share)


def measure_costs(
    program: TunedProgram,
    *,
    rounds: int = _ROUNDS,
    deadline: float = math.inf,
    progress: Callable[[str], None] = lambda _: None,
) -> ProgramCosts:
    """Measure every distinct call in float32 and in 16 bits, and casts of sizes from the smallest to the largest.

    After `deadline`, on `time.monotonic`'s clock, one call and casts of two sizes are measured anyway.
    """
    casts: dict[bool, dict[int, float]] = {True: {}, False: {}}
    largest = max([1, *(edge.elements for edge in program.edges)])
    for power in range(1 + max(0, math.ceil(math.log(largest / _SMALLEST, 4)))):
        if power > 1 and time.monotonic() > deadline:
            break
        size = _SMALLEST * 4**power
        progress(f"casts of {size:,} elements")
        wide = torch.ones(size, device=program.device)
        functions = {
            True: functools.partial(_time_cast, wide, program.low),
            False: functools.partial(_time_cast, wide.to(program.low), _F32),
        }
        for down, seconds in time_in_turns(functions, rounds, deadline).items():
            casts[down][size] = seconds
    variants = {dtype: CallVariant(dtype) for dtype in (_F32, program.low)}
    sites, skipped = measure_calls(
        program, program.sites, variants, rounds=rounds, deadline=deadline, progress=progress
    )
    return ProgramCosts(sites, casts, skipped)


def _time_cast(tensor: Tensor, dtype: torch.dtype) -> float:
    start = perf_counter()
    tensor.to(dtype)
    return perf_counter() - start


@dataclass(frozen=True)
class CallVariant:
    """The dtype of the arguments of a call, and a region to call it in, which casts weights; None for no region."""

    dtype: torch.dtype
    region: AbstractContextManager[object] | None = None


def measure_calls(
    program: TunedProgram,
    sites: Sequence[OperationSite],
    variants: Mapping[Any, CallVariant],
    *,
    rounds: int = _ROUNDS,
    deadline: float = math.inf,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[dict[OperationSite, dict[Any, CallCost]], int]:
    """Return the cost of all calls of each operation in a step by variant, and the number of operations without time.

    Variants in which a call raises an error are missing.
    """
    calls = distinct_calls(sites)
    costs: dict[CallRecord, dict[Any, CallCost]] = {}
    for call in calls:
        if costs and time.monotonic() > deadline:
            break
        progress(f"{len(costs)} of {len(calls)}, {call.overload}")
        with torch.random.fork_rng([]):
            trials = {
                key: _CallTrial(call, variant, program.device) for key, variant in variants.items()
            }
            trials = {key: trial for key, trial in trials.items() if trial.works()}
            passes = {(key, True): trial.forward for key, trial in trials.items()}
            passes |= {(key, False): trial.backward for key, trial in trials.items()}
            seconds = time_in_turns(passes, rounds, deadline)
            costs[call] = {
                key: CallCost(
                    seconds[key, True], seconds[key, False], trial.kept_bytes(program.is_inference)
                )
                for key, trial in trials.items()
            }
    totals = {site: _sum_of_calls(site, costs) for site in sites}
    skipped = sum(any(call not in costs for call in site.calls) for site in sites)
    return {site: total for site, total in totals.items() if total}, skipped


def distinct_calls(sites: Iterable[OperationSite]) -> list[CallRecord]:
    """Return the calls with different costs, those with the most work in a step first."""
    work: Counter[CallRecord] = Counter()
    for call in (call for site in sites for call in site.calls):
        work[call] += round(_work(call) * (call.count + call.recomputed))
    return [call for call, _ in work.most_common()]


def _work(call: CallRecord) -> float:
    """Return about how much work a call is: the multiplications of a product of matrices, or else the elements."""
    matrices = [a.shape for a in call.tensors if a.dtype.is_floating_point and len(a.shape) > 1]
    elements = float(sum(math.prod(argument.shape) for argument in call.tensors))
    if len(matrices) < 2:
        return elements
    summed = max(set(matrices[0]) & set(matrices[1]), default=1)
    return max(elements, math.prod(matrices[0]) * math.prod(matrices[1]) / max(1, summed))


def _sum_of_calls(
    site: OperationSite, costs: Mapping[CallRecord, Mapping[Any, CallCost]]
) -> dict[Any, CallCost]:
    """Return the cost of all calls of an operation in a step by variant, without variants that one call lacks."""
    pairs = [(call, costs.get(call, {})) for call in site.calls]
    keys = [key for key in pairs[0][1] if all(key in each for _, each in pairs)] if pairs else []
    return {
        key: CallCost(
            sum(each[key].forward * (call.count + call.recomputed) for call, each in pairs),
            sum(each[key].backward * call.count for call, each in pairs),
            sum(
                each[key].kept_bytes * max(0, call.count - call.recomputed) for call, each in pairs
            ),
        )
        for key in keys
    }


class _CallTrial:
    """One call on random tensors."""

    def __init__(self, call: CallRecord, variant: CallVariant, device: str) -> None:
        generator = torch.Generator(device).manual_seed(0)
        function = _torch.find_overload(call.overload)
        assert function is not None, f"{call.overload} was recorded"
        self._function = function
        self._region = variant.region or nullcontext()

        def dtype_of(_: int, argument: TensorArgument) -> torch.dtype:
            is_fixed = argument.stays or (variant.region is not None and argument.is_weight)
            is_free = is_castable(argument.dtype) and not is_fixed
            return variant.dtype if is_free else argument.dtype

        self._args, self._kwargs = call.random_arguments(dtype_of, generator)
        tensors = tensors_in((self._args, self._kwargs))
        self._leaves = [tensor for tensor in tensors if tensor.requires_grad]
        pairs = zip(tensors, call.tensors, strict=True)
        self._weights = [tensor for tensor, argument in pairs if argument.is_weight]
        self._gradients: list[Tensor] | None = None
        self._writes = bool(written_arguments(call.overload, self._args, self._kwargs))

    def works(self) -> bool:
        """Return True if neither pass raises an error."""
        try:
            self.backward()
        except Exception:  # an operation may raise anything
            return False
        return True

    def forward(self) -> float:
        """Run the forward pass; return its seconds."""
        args, kwargs = self._arguments()
        start = perf_counter()
        with self._region:
            self._function(*args, **kwargs)
        return perf_counter() - start

    def backward(self) -> float:
        """Run both passes; return the seconds of the backward pass."""
        roots = [tensor for tensor in self._results(*self._arguments()) if tensor.requires_grad]
        if not roots:
            return 0.0
        if self._gradients is None:
            self._gradients = [torch.ones_like(root) for root in roots]
        start = perf_counter()
        torch.autograd.grad(roots, self._leaves, self._gradients, allow_unused=True)
        return perf_counter() - start

    def kept_bytes(self, is_inference: bool) -> int:
        """Return the bytes that autograd saves for backward, without weights; in inference, those of new results."""
        args, kwargs = self._arguments()
        if not is_inference:
            with saved_for_backward(self._weights) as saved:
                self._results(args, kwargs)
            return sum(storage.nbytes() for storage in saved.values())
        inputs = storage_sizes(tensors_in((args, kwargs)))
        results = storage_sizes(self._results(args, kwargs))
        return sum(size for storage, size in results.items() if storage not in inputs)

    def _results(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        with self._region:
            return tensors_in(self._function(*args, **kwargs))

    def _arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments, or copies of them where the operation writes to them."""
        if not self._writes:
            return self._args, self._kwargs
        args, kwargs = map_tensors((self._args, self._kwargs), torch.clone)
        return args, kwargs


def time_in_turns(
    functions: Mapping[_Key, Callable[[], float]], rounds: int, deadline: float = math.inf
) -> dict[_Key, float]:
    """Call each function `rounds` times, in turns, and return the median of the seconds that it returns.

    After `deadline`, on `time.monotonic`'s clock, each gets only the fewest turns.
    """
    repeats = {key: _repeats(function) for key, function in functions.items()}
    seconds: dict[_Key, list[float]] = {key: [] for key in functions}
    keys = list(functions)
    for turn in range(rounds):
        if turn >= _FEWEST_ROUNDS and time.monotonic() > deadline:
            break
        for key in keys[turn % len(keys) :] + keys[: turn % len(keys)] if keys else ():
            times = [functions[key]() for _ in range(repeats[key])]
            seconds[key].append(statistics.fmean(times))
    return {key: statistics.median(times) for key, times in seconds.items()}


def _repeats(function: Callable[[], float]) -> int:
    function()  # the first call loads code and memory
    return max(1, min(_MOST_REPEATS, round(_SHORTEST / max(function(), 1e-7))))
