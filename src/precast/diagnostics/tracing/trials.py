"""Trials of advice: operations run again on tensors of the same shapes, to see that advice works and what it saves.

Invariants: a trial runs in a thread of its own, which has no region, mode, transform or trace; it writes to no tensor
of the program and draws from no generator of the program; a call that is kept holds no tensor.
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

__all__ = ["Call", "Saving", "call_of", "saving", "works", "works_after_cast"]

_MOST_ELEMENTS: Final = 2**26
_PAIRS: Final = 7
_FEWEST_PAIRS: Final = 3
_LEAST: Final = 0.05
"""The smallest part of a call's time that has to be saved in each pair of runs."""
_MOST_SECONDS: Final = 0.5
"""A trial of slow calls has fewer pairs, and is not made if they would be fewer than the fewest."""


class _Shape(NamedTuple):
    """The description of a tensor, from which another one like it is made."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class Call(NamedTuple):
    """A call of an operation, with its tensors, or with their descriptions in their place."""

    overload: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Saving(NamedTuple):
    """The time that one call saves, in seconds, over several pairs of runs."""

    low: float
    middle: float
    high: float


def call_of(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """Return the description of a call that can be run again; None for any that cannot.

    That is for operations that write to an argument or draw random numbers, and for tensors that are not plain, dense,
    on the CPU and of a floating dtype.
    """
    tensors = tensors_of(args, kwargs)
    schema = _torch.schema_of(overload)
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    is_random = torch.Tag.nondeterministic_seeded in overload.tags
    if writes or is_random or not tensors or not all(map(_can_be_made_again, tensors)):
        return None
    if sum(tensor.numel() for tensor in tensors) > _MOST_ELEMENTS:
        return None
    describe: Any = lambda t: _Shape(tuple(t.shape), tuple(t.stride()), t.dtype)  # noqa: E731
    return Call(overload, *map_tensors((args, kwargs), describe))


def saving(call: Call, dtype: torch.dtype, *, returns: torch.dtype | None) -> Saving | None:
    """Return what a call saves that runs in `dtype`; None where that is not certain, or it cannot run so.

    Args:
        call: what runs now, with inputs in 16 bits cast to float32.
        dtype: 16 bits.
        returns: the dtype to which the results are cast now, for what follows; None where they are used as they are,
            and have to be cast back after a run in `dtype`.
    """
    measured: Saving | None = _in_own_thread(lambda: _measured(call, dtype, returns))
    return measured


def works(call: Call, policy: Policy, device: str, dtype: torch.dtype | None = None) -> bool:
    """Return True if a call runs in a region with a policy, on copies of its tensors."""

    def run() -> bool:
        args, kwargs = map_tensors((call.args, call.kwargs), _copy)
        with torch.no_grad(), autocast(device, dtype, policy=policy):
            call.overload(*args, **kwargs)
        return True

    return bool(_in_own_thread(run))


def works_after_cast(call: Call, dtype: torch.dtype) -> bool:
    """Return True if a call runs when its floating-point tensors are cast to a dtype, but for those it writes to."""

    def run() -> bool:
        arguments = _torch.schema_of(call.overload).arguments
        names = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
        given = dict(zip((a.name for a in arguments), call.args, strict=False)) | call.kwargs
        if any(given[name].dtype is not dtype for name in names & given.keys()):
            return False
        args, kwargs = map_tensors((call.args, call.kwargs), lambda t: _copy(_cast(t, dtype)))
        with torch.no_grad():
            call.overload(*args, **kwargs)
        return True

    return bool(_in_own_thread(run))


def _measured(call: Call, dtype: torch.dtype, returns: torch.dtype | None) -> Saving | None:
    generator = torch.Generator().manual_seed(0)

    def make(shape: _Shape) -> Tensor:
        is_expanded = any(
            stride == 0 < size - 1 for size, stride in zip(shape.sizes, shape.strides, strict=True)
        )
        strides = torch.empty(shape.sizes, device="meta").stride() if is_expanded else shape.strides
        made = torch.empty_strided(shape.sizes, strides, dtype=torch.float32)
        return made.normal_(generator=generator).to(shape.dtype)

    args, kwargs = _made(call.args, make), _made(call.kwargs, make)

    def seconds(inputs: torch.dtype, results: torch.dtype) -> float:
        start = perf_counter()
        cast_args, cast_kwargs = map_tensors((args, kwargs), lambda t: t.to(inputs))
        map_tensors(call.overload(*cast_args, **cast_kwargs), lambda t: t.to(results))
        return perf_counter() - start

    wide = torch.float32
    now, then = (wide, returns or wide), (dtype, returns or wide)
    with torch.inference_mode():
        first = seconds(*now) + seconds(*then)
        pairs = min(_PAIRS, int(_MOST_SECONDS / first))
        if pairs < _FEWEST_PAIRS:
            return None
        times = [(seconds(*now), seconds(*then)) for _ in range(pairs)]
    differences = sorted(before - after for before, after in times)
    is_certain = differences[0] > _LEAST * min(before for before, _ in times)
    middle = differences[pairs // 2]
    return Saving(differences[0], middle, differences[-1]) if is_certain else None


def _in_own_thread(run: Callable[[], Any]) -> Any:
    """Return what `run` returns in a new thread; None if it raises."""
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


def _can_be_made_again(tensor: Tensor) -> bool:
    return (
        _torch.is_plain(type(tensor))
        and not _torch.is_functorch_wrapper(tensor)
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.is_floating_point()
        and not tensor.is_quantized
    )


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _made(value: Any, make: Callable[[_Shape], Tensor]) -> Any:
    """Replace descriptions by tensors, in lists, tuples and dictionaries."""
    if isinstance(value, _Shape):
        return make(value)
    if isinstance(value, dict):
        return {name: _made(item, make) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_made(item, make) for item in value)
    return value
