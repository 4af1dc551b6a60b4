"""Trials of advice: operations are repeated on tensors of the same shapes, to verify advice and measure its saving.

Invariants: a trial runs in a new thread without a region, mode, transform or trace; it writes no tensor of the program
and uses no generator of the program; the description of a call holds no tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from precast import _torch
from precast._internal.pytree import map_tensors
from precast.autocast_mode.region import autocast
from precast.engine.operator_kinds import tensors_of
from precast.policy.policy import Policy

__all__ = [
    "TrialCall",
    "TrialSaving",
    "describe_call",
    "measure_saving",
    "works",
    "works_after_cast",
]

_MOST_ELEMENTS: Final = 2**26
_PAIRS: Final = 20
_FEWEST_PAIRS: Final = 3
_LEAST: Final = 0.05
"""The smallest share of a call's time that a pair of runs must save."""
_OUTLIERS: Final = 4
"""The most of `_PAIRS` that may save nothing, because another program interrupted one of the runs. A change that saves
time in half of all pairs passes with a probability below 1/128."""
_MOST_SECONDS: Final = 0.5
"""A trial of slow calls has fewer pairs of runs, and no result below `_FEWEST_PAIRS`."""


class _TensorLayout(NamedTuple):
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class TrialCall(NamedTuple):
    """A call of an operation, with its tensors, or with their descriptions in their place."""

    overload: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class TrialSaving(NamedTuple):
    """The time that one call saves, in seconds: the smallest, the median and the largest of pairs of runs.

    As many of the smallest and of the largest are omitted as another program may have interrupted.
    """

    low: float
    middle: float
    high: float


def describe_call(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TrialCall | None:
    """Return the description of a call that can be repeated; None for others.

    Operations that write an argument or use random numbers cannot be repeated, nor can calls with tensors that are not
    plain, dense, floating-point and on the CPU.
    """
    tensors = tensors_of(args, kwargs)
    schema = _torch.schema_of(overload)
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    is_random = torch.Tag.nondeterministic_seeded in overload.tags
    if writes or is_random or not tensors or not all(map(_is_repeatable, tensors)):
        return None
    if sum(tensor.numel() for tensor in tensors) > _MOST_ELEMENTS:
        return None
    describe: Any = lambda t: _TensorLayout(tuple(t.shape), tuple(t.stride()), t.dtype)  # noqa: E731
    return TrialCall(overload, *map_tensors((args, kwargs), describe))


def measure_saving(
    call: TrialCall, dtype: torch.dtype, *, returns: torch.dtype | None
) -> TrialSaving | None:
    """Return the saving of a call in `dtype`; None if it is not certain, or the call cannot run in that dtype.

    Args:
        call: the call as it runs now, on 16-bit inputs that are cast to float32.
        dtype: a 16-bit dtype.
        returns: the dtype to which the results are cast now; None if they are used in float32, so that they would have
            to be cast back after a run in `dtype`.
    """
    measured: TrialSaving | None = _in_own_thread(lambda: _measured(call, dtype, returns))
    return measured


def works(call: TrialCall, policy: Policy, device: str, dtype: torch.dtype | None = None) -> bool:
    """Return True if a call runs in a region with a policy, on copies of its tensors."""

    def run() -> bool:
        args, kwargs = map_tensors((call.args, call.kwargs), _copy)
        with torch.no_grad(), autocast(device, dtype, policy=policy):
            call.overload(*args, **kwargs)
        return True

    return bool(_in_own_thread(run))


def works_after_cast(call: TrialCall, dtype: torch.dtype) -> bool:
    """Return True if a call runs with its floating-point tensors cast to a dtype, except those that it writes."""

    def run() -> bool:
        arguments = _torch.schema_of(call.overload).arguments
        names = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
        values = dict(zip((a.name for a in arguments), call.args, strict=False)) | call.kwargs
        if any(values[name].dtype is not dtype for name in names & values.keys()):
            return False
        args, kwargs = map_tensors((call.args, call.kwargs), lambda t: _copy(t, dtype))
        with torch.no_grad():
            call.overload(*args, **kwargs)
        return True

    return bool(_in_own_thread(run))


def _random_arguments(call: TrialCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)

    def make(shape: _TensorLayout) -> Tensor:
        is_expanded = any(
            stride == 0 < size - 1 for size, stride in zip(shape.sizes, shape.strides, strict=True)
        )
        strides = torch.empty(shape.sizes, device="meta").stride() if is_expanded else shape.strides
        tensor = torch.empty_strided(shape.sizes, strides, dtype=torch.float32)
        return tensor.normal_(generator=generator).to(shape.dtype)

    return _with_tensors(call.args, make), _with_tensors(call.kwargs, make)


def _measured(
    call: TrialCall, dtype: torch.dtype, returns: torch.dtype | None
) -> TrialSaving | None:
    args, kwargs = _random_arguments(call)

    def seconds(inputs: torch.dtype, results: torch.dtype) -> float:
        start = perf_counter()
        cast_args, cast_kwargs = map_tensors((args, kwargs), lambda t: t.to(inputs))
        map_tensors(call.overload(*cast_args, **cast_kwargs), lambda t: t.to(results))
        return perf_counter() - start

    wide = torch.float32
    current, changed = (wide, returns or wide), (dtype, returns or wide)
    with torch.inference_mode():
        start = perf_counter()
        seconds(*current), seconds(*changed)  # the first runs also allocate and compile
        if perf_counter() - start > _MOST_SECONDS:
            return None
        times: list[tuple[float, float]] = []
        start = perf_counter()
        while len(times) < _PAIRS and perf_counter() - start < _MOST_SECONDS:
            times.append((seconds(*current), seconds(*changed)))
    pairs = len(times)
    if pairs < _FEWEST_PAIRS:
        return None
    differences = sorted(before - after for before, after in times)
    outliers = _OUTLIERS if pairs == _PAIRS else 0
    low, middle, high = (differences[i] for i in (outliers, pairs // 2, pairs - 1 - outliers))
    is_certain = low > _LEAST * min(before for before, _ in times)
    return TrialSaving(low, middle, high) if is_certain else None


def _in_own_thread(run: Callable[[], Any]) -> Any:
    """Return the result of `run` in a new thread; None if it raises."""
    results: list[Any] = []

    def work() -> None:
        try:
            results.append(run())
        except Exception:
            results.append(None)

    thread = threading.Thread(target=work, name="precast trial")
    thread.start()
    thread.join()
    return results[0]


def _is_repeatable(tensor: Tensor) -> bool:
    return (
        _torch.is_plain(type(tensor))
        and not _torch.is_functorch_wrapper(tensor)
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.is_floating_point()
        and not tensor.is_quantized
    )


def _copy(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return tensor.detach().to(dtype if tensor.is_floating_point() else None, copy=True)


def _with_tensors(value: Any, make: Callable[[_TensorLayout], Tensor]) -> Any:
    """Replace the descriptions of tensors by tensors, in lists, tuples and dictionaries."""
    if isinstance(value, _TensorLayout):
        return make(value)
    if isinstance(value, dict):
        return {name: _with_tensors(item, make) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_with_tensors(item, make) for item in value)
    return value
