"""What each site costs in each dtype, measured on this machine: the time of both passes, and memory kept for backward.

Invariants:

- calls that are alike are measured once, however many modules make them, so the time that measuring takes is
  proportional to the number of different calls;
- where the time ends first, what takes most was measured first, and the rest is estimated from the same operation at
  other sizes; which sites that are is known;
- the dtypes of one call are measured in turns with each other;
- a call is made at the dispatcher, outside of all regions, on random tensors of the recorded shapes, strides and
  ranges. What casts its arguments costs extra, and is an edge's;
- what a rule for a module adds to each call of it, by its hooks, is measured with a module that does nothing;
- times are the host's, which are those of the work only on devices that work synchronously, such as the CPU.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Final

import torch
from torch import Tensor, nn

from precast import _torch
from precast.attachment.attachment import attach
from precast.autocast_mode.region import autocast
from precast.policy.policy import Policy
from precast.tuning.calls import arguments_of, is_castable, made, tensors_in_order
from precast.tuning.estimating import Cost, estimated, in_order
from precast.tuning.sites import Call, Program, Site
from precast.tuning.timing import Figure, in_turns

__all__ = ["Cost", "Costs", "Progress", "cast_sizes", "distinct_calls", "key_of", "measure"]

_F32: Final = torch.float32
_ROUNDS: Final = 7
_SMALLEST: Final = 64
"""Elements of the smallest cast that is measured; below, a cast takes as long as its call does."""

Progress = Callable[[int, int, str], None]
"""Is told how many measurements are done, how many there are, and what is measured next."""


@dataclass(frozen=True)
class Costs:
    """What a program's sites and casts cost.

    Attributes:
        sites: each site -> dtype -> the cost of all of its calls in one step. Sites that could not be measured, as they
            refuse random numbers, are missing.
        casts: whether down, to 16 bits -> elements -> the time of one cast.
        low: the 16-bit dtype.
        hook: the time that a rule for a module adds to each call of it.
        estimated: the sites of which a call was not measured for want of time; their costs are those of the same
            operation at other sizes.
    """

    sites: Mapping[Site, Mapping[torch.dtype, Cost]]
    casts: Mapping[bool, Mapping[int, Figure]] = field(default_factory=dict)
    low: torch.dtype = torch.bfloat16
    hook: float = 0.0
    estimated: frozenset[Site] = frozenset()

    def seconds(self, site: Site, dtype: torch.dtype) -> float:
        """The time of a site's calls in a step; 0 where it is not known, so that neither dtype is preferred."""
        known = self.sites.get(site, {})
        return known[dtype].seconds if len(known) == 2 else 0.0

    def kept(self, site: Site, dtype: torch.dtype) -> int:
        """The bytes that a site's calls keep in a step."""
        known = self.sites.get(site, {})
        return known[dtype].kept if len(known) == 2 else 0

    def cast(self, elements: int, *, down: bool) -> float:
        """The seconds of one cast of so many elements; between measured sizes, a straight line in logarithms."""
        measured = self.casts.get(down, {})
        sizes = sorted(measured)
        if not sizes or elements <= 0:
            return 0.0
        at = bisect.bisect_left(sizes, elements)
        if at == 0:
            return measured[sizes[0]].seconds
        if at == len(sizes):
            return measured[sizes[-1]].seconds * elements / sizes[-1]
        before, after = sizes[at - 1], sizes[at]
        share = math.log(elements / before) / math.log(after / before)
        one, other = (max(measured[size].seconds, 1e-12) for size in (before, after))
        return float(one ** (1 - share) * other**share)


def measure(
    program: Program,
    *,
    rounds: int = _ROUNDS,
    seed: int = 0,
    deadline: float = math.inf,
    progress: Progress | None = None,
) -> Costs:
    """Measures every distinct call in float32 and in 16 bits, and casts of the sizes that the program has.

    Args:
        program: what was recorded.
        rounds: how often each is timed.
        seed: of the random tensors.
        deadline: on `time.monotonic`'s clock; calls that are not measured by then are estimated. The call that
            takes most, and casts of two sizes, are measured anyway.
        progress: is told before each measurement, and at the end.
    """
    calls, sizes = distinct_calls(program), cast_sizes(program)
    tell = progress or (lambda _done, _all, _what: None)
    steps = len(calls) + len(sizes)
    casts: dict[bool, dict[int, Figure]] = {True: {}, False: {}}
    for done, size in enumerate(sizes):
        if done > 1 and time.monotonic() > deadline:
            break
        tell(done, steps, f"casts of {size:,} elements")
        for down, figure in _measured_casts(size, program, rounds, deadline).items():
            casts[down][size] = figure
    known: dict[object, Mapping[torch.dtype, Cost]] = {}
    for done, key in enumerate(in_order(calls, _counts(program))):
        if known and time.monotonic() > deadline:
            break
        tell(len(sizes) + done, steps, calls[key].overload)
        known[key] = _measured(calls[key], program, rounds, seed, deadline)
    tell(steps, steps, "")
    all_known = {**known, **estimated(calls, known)}
    sites = {
        site: _summed([(call, all_known.get(key_of(call), {})) for call in site.calls])
        for site in program.sites
    }
    return Costs(
        {site: costs for site, costs in sites.items() if costs},
        casts,
        program.low,
        _measured_hook(program, rounds),
        frozenset(
            site for site in program.sites if any(key_of(call) not in known for call in site.calls)
        ),
    )


def _counts(program: Program) -> dict[object, int]:
    """How often a step makes each distinct call."""
    counts: dict[object, int] = {}
    for site in program.sites:
        for call in site.calls:
            key = key_of(call)
            counts[key] = counts.get(key, 0) + call.count + call.recomputed
    return counts


def distinct_calls(program: Program) -> dict[object, Call]:
    """The calls of a program that differ in more than their numbers and how often they are made."""
    found: dict[object, Call] = {}
    for site in program.sites:
        for call in site.calls:
            found.setdefault(key_of(call), call)
    return found


def cast_sizes(program: Program) -> list[int]:
    """The sizes at which casts are measured: powers of 4 from the smallest tensor that may be cast to the largest."""
    largest = max((edge.elements for edge in program.edges), default=0)
    if largest == 0:
        return []
    sizes = [_SMALLEST]
    while sizes[-1] < largest:
        sizes.append(sizes[-1] * 4)
    return sizes


def key_of(call: Call) -> object:
    """What distinguishes calls: not the ranges of their numbers."""
    plain = dataclasses.replace(call, count=1, recomputed=0)
    shapes = tuple(
        (a.shape, a.strides, a.dtype, a.is_weight, a.needs_grad, a.stays)
        for a in arguments_of(plain)
    )
    others = (_without_tensors(plain.args), _without_tensors(tuple(plain.kwargs.items())))
    return call.overload, shapes, others


def _without_tensors(value: object) -> object:
    if isinstance(value, tuple):
        return tuple(_without_tensors(each) for each in value)
    return "tensor" if dataclasses.is_dataclass(value) else value


def _summed(
    calls: list[tuple[Call, Mapping[torch.dtype, Cost]]],
) -> dict[torch.dtype, Cost]:
    """The costs of all calls of a site; empty where one could not be measured in either dtype."""
    found: dict[torch.dtype, Cost] = {}
    for dtype in {dtype for _, costs in calls for dtype in costs}:
        if not all(dtype in costs for _, costs in calls):
            continue
        total = Cost(Figure(0.0))
        for call, costs in calls:
            one = costs[dtype]
            total = Cost(
                total.forward.plus(one.forward.times(call.count + call.recomputed)),
                total.backward.plus(one.backward.times(call.count)),
                total.kept + one.kept * (call.count - min(call.count, call.recomputed)),
            )
        found[dtype] = total
    return found


def _measured(
    call: Call, program: Program, rounds: int, seed: int, deadline: float
) -> dict[torch.dtype, Cost]:
    """The cost of one call in each dtype in which it can be made."""
    trials: dict[torch.dtype, _Trial] = {}
    with torch.random.fork_rng([]):
        for dtype in (_F32, program.low):
            trial = _Trial(call, dtype, program.device, seed)
            if trial.works():
                trials[dtype] = trial
        works = {
            (dtype, part): getattr(trial, part)
            for dtype, trial in trials.items()
            for part in ("forward", "backward")
        }
        figures = in_turns(works, rounds, deadline)
    return {
        dtype: Cost(
            figures[dtype, "forward"],
            figures[dtype, "backward"],
            trial.made() if program.is_inference else trial.kept(),
        )
        for dtype, trial in trials.items()
    }


class _Trial:
    """One call in one dtype, that can be timed."""

    def __init__(self, call: Call, dtype: torch.dtype, device: str, seed: int) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        function = _torch.find_overload(call.overload)
        assert function is not None, f"{call.overload} was recorded"
        self._function = function
        arguments = arguments_of(call)

        def as_given(_: int, argument: Any) -> torch.dtype:
            is_cast = is_castable(argument.dtype) and not argument.stays
            return dtype if is_cast else argument.dtype

        self._args, self._kwargs = made(call, as_given, generator)
        self._weights = [
            tensor
            for tensor, argument in zip(self._tensors(), arguments, strict=True)
            if argument.is_weight
        ]
        self._gradients: list[Tensor] | None = None
        self._writes = self._is_written()

    def works(self) -> bool:
        """Whether it raises no error, forward and backward."""
        try:
            self.forward()
            self.backward()
        except Exception:  # an operation may raise anything
            return False
        return True

    def forward(self) -> float:
        """Runs forward; the seconds that it took."""
        args, kwargs = self._fresh()
        start = perf_counter()
        self._function(*args, **kwargs)
        return perf_counter() - start

    def backward(self) -> float:
        """Runs forward and backward; the seconds that backward took."""
        args, kwargs = self._fresh()
        roots = self._roots(self._function(*args, **kwargs))
        if not roots:
            return 0.0
        if self._gradients is None:
            self._gradients = [torch.ones_like(root) for root in roots]
        leaves = [tensor for tensor in self._tensors() if tensor.requires_grad]
        start = perf_counter()
        torch.autograd.grad(roots, leaves, self._gradients, allow_unused=True)
        return perf_counter() - start

    def kept(self) -> int:
        """The bytes of the memory that autograd keeps, each storage once, without weights."""
        weights = {id(tensor.untyped_storage()) for tensor in self._weights}
        kept: dict[int, Any] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if id(storage) not in weights:
                kept[id(storage)] = storage
            return tensor

        args, kwargs = self._fresh()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = self._function(*args, **kwargs)
        del result
        return sum(storage.nbytes() for storage in kept.values())

    def made(self) -> int:
        """The bytes of the memory of its results that it was not given."""
        args, kwargs = self._fresh()
        given = {id(tensor.untyped_storage()) for tensor in tensors_in_order(args, kwargs)}
        results = tensors_in_order((self._function(*args, **kwargs),), {})
        storages = {id(s): s for s in (tensor.untyped_storage() for tensor in results)}
        return sum(storage.nbytes() for key, storage in storages.items() if key not in given)

    def _tensors(self) -> list[Tensor]:
        return tensors_in_order(self._args, self._kwargs)

    def _is_written(self) -> bool:
        """Whether it writes to its arguments, so that each call needs copies of them."""
        arguments = _torch.schema_of(self._function).arguments
        return any(a.alias_info is not None and a.alias_info.is_write for a in arguments)

    def _fresh(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments; copies of them where they would be written to. A leaf itself could not be."""
        if not self._writes:
            return self._args, self._kwargs
        return _cloned(self._args), {name: _cloned(value) for name, value in self._kwargs.items()}

    def _roots(self, result: Any) -> list[Tensor]:
        return [tensor for tensor in tensors_in_order((result,), {}) if tensor.requires_grad]


def _cloned(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return tuple(map(_cloned, value)) if isinstance(value, tuple) else value


def _measured_casts(
    size: int, program: Program, rounds: int, deadline: float
) -> dict[bool, Figure]:
    wide = torch.randn(size, generator=torch.Generator(program.device).manual_seed(0))
    narrow = wide.to(program.low)

    def down() -> None:
        wide.to(program.low)

    def up() -> None:
        narrow.to(_F32)

    return in_turns({True: down, False: up}, rounds, deadline)


def _measured_hook(program: Program, rounds: int) -> float:
    """The seconds that a rule for operations adds to a call of a module."""
    nothing = Policy("nothing", {})
    rules = {"0": {"ops": {"softmax": "fp32"}}}
    numbers = torch.zeros(1, device=program.device)
    works: dict[bool, Callable[[], None]] = {}
    for ruled, policy in ((False, nothing), (True, nothing.replace(modules=rules))):
        model = nn.Sequential(nn.Identity())
        attach(model, policy, hold=False)
        works[ruled] = functools.partial(_called, model, numbers)
    with autocast(program.device, dtype=program.low, policy=nothing):
        figures = in_turns(works, rounds)
    return max(0.0, figures[True].seconds - figures[False].seconds)


def _called(model: nn.Module, numbers: Tensor) -> None:
    model(numbers)
