"""Writes the Python kernel that runs at the autocast key of an operation.

Invariants:

- the kernel is the same for all policies: it looks up the thread's bound policy, or else the installed one, and without
  one calls PyTorch's kernel;
- where the bound policy says `DELEGATE`, each tensor that the weight cache holds is replaced by its copy, and PyTorch's
  kernel does the work;
- the code is written out for each operation, one block for each tensor, because a loop or a call for each tensor costs
  more than PyTorch's whole cache: on `F.linear` of 8x8 with weight and bias this kernel adds 2.9 us, a loop over the
  arguments 3.7 us (2-core CPU, torch 2.13; `make bench` measures it);
- the dispatcher keeps one function for good: while a trace is open, the code of that function is exchanged.

`_ENTRY_POINT` is the kernel as a person reads it; `source` fills it in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, Final, cast

import torch

from precast import _torch
from precast._torch import Kernel as DispatcherKernel
from precast.engine import reference_kernels
from precast.engine.operation import Operation
from precast.engine.thread_state import Kernel, inherited_policy, installed, thread_state
from precast.weights import held, unversioned_writes
from precast.weights.freshness import fresh_expression
from precast.weights.weight_cache import WeightCache

__all__ = ["DELEGATE", "Watcher", "entry_point", "source", "unwatch", "watch"]


def _delegate(_keyset: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    raise AssertionError("the kernel at the autocast key does this itself")


DELEGATE: Final[Kernel] = _delegate
"""What was there before precast does it: PyTorch's compiled kernel, given weights that the cache has cast.

Where the policy promotes mixed dtypes and that raises on them, once more in the widest.
"""

Watcher = Callable[[Operation, Callable[..., Any], tuple[Any, ...], dict[str, Any], int], Any]
"""What stands around a kernel: called as ``watcher(op, plain, args, kwargs, skip)``.

It gives what ``plain(*args, **kwargs)`` gives; the first `skip` of `args` are none of the operation's own.
"""

_ENTRY_POINT = """\
def entry_point({parameters}):
    here = thread.state
    bound = here.bound_policy or installed.bound_policy
    if bound is None:
        bound = inherited_policy(device_type)
        if bound is None:
            return native_kernel(keyset, {arguments})
    kernel = bound.kernels.get(name)
    if kernel is not DELEGATE:
        if kernel is None:
            return native_kernel(keyset, {arguments})
        return kernel(keyset, ({positional}), {keywords})
{swap}
{attempt}
    return retry_promoted(op, failure, ({positional}), {keywords})
"""

_ATTEMPT = """\
    try:
        return native_kernel(keyset, {swapped})
    except RuntimeError as error:
        if bound.policy.mixed == "raise":
            raise
        failure = error
"""

# Autocast stays on below: what is promoted is the outermost operation, so that its result has the widest dtype.
_ATTEMPT_WITH_AUTOCAST_ON = f"""\
    here.attempts += 1
{_ATTEMPT}\
    finally:
        here.attempts -= 1
"""

_SWAP = """\
    {copies} = {originals}
    if cache_enabled() and (held or not inference_mode()):
        dtype = lower_dtype(device_type)
        cache = here.cache
        if held:
            here.uses += 1
            if here.uses >= USES_BETWEEN_CHECKS:
                here.uses = 0
                check()
        if dispatch_modes() or is_tracing():
            find = find_held = nothing
        else:
            records = grad_enabled()
            find_held = (cache.per_region if records else cache.persistent)[dtype].get if {use_held} else nothing
            find = cache.leaves[dtype].get if records or not held else find_held
"""

# A CUDA graph keeps what it was given, whatever becomes of the weights.
_USE_HELD = "held"

# What the cache holds is float32, and most activations are not: their dtype is all that is looked at. The copy is read
# before the version: another thread that withdraws it writes them in the other order.
# What requires no grad is kept for attached models alone: PyTorch casts it at each use.
_TENSOR = """\
        if {condition}:
            entry = (find if {a}.requires_grad else find_held)(id({a}))
            if (
                entry is not None
                and (copy := entry.cast) is not None
                and {fresh}
            ):
                {b} = copy
            elif {a}.requires_grad or (held and (id({a}) in held or id({a}._base) in held)):
                copy = None  # who still reads what was copied has it written elsewhere
                {b} = weight(cache, {a}, dtype, device_type)
"""

_TENSORS = """\
        {b} = weight(cache, {a}, dtype, device_type)
"""


def entry_point(
    op: Operation, native_kernel: DispatcherKernel, *, takes_weights: bool, needs_keyset: bool
) -> DispatcherKernel:
    """The kernel to be registered for `op`.

    Args:
        op: the operation.
        native_kernel: what was there before.
        takes_weights: whether to look for its tensors in the weight cache.
        needs_keyset: whether it is called with a keyset, for a `native_kernel` that looks at it.
    """
    namespace: dict[str, Any] = {
        "DELEGATE": DELEGATE,
        "USES_BETWEEN_CHECKS": unversioned_writes.USES_BETWEEN_CHECKS,
        "capturing": _torch.is_capturing,
        "cache_enabled": torch.is_autocast_cache_enabled,
        "device_type": op.device_type,
        "dispatch_modes": _torch.dispatch_modes,
        "float32": torch.float32,
        "grad_enabled": torch.is_grad_enabled,
        "held": held.held_parameters,
        "installed": installed(op.device_type),
        "is_tracing": _torch.is_tracing,
        "inference_mode": torch.is_inference_mode_enabled,
        "native_kernel": native_kernel,
        "keyset": _torch.keyset_of(op.device_type),
        "check": unversioned_writes.check_within_region,
        "lower_dtype": torch.get_autocast_dtype,
        "inherited_policy": inherited_policy,
        "name": op.name,
        "nothing": {}.get,
        "op": op,
        "retry_promoted": reference_kernels.retry_promoted,
        "thread": thread_state(op.device_type),
        "weight": _weight,
    }
    schema = _torch.schema_of(op.overload).arguments
    namespace |= {
        f"default{i}": a.default_value for i, a in enumerate(schema) if a.has_default_value()
    }
    text = source(op, takes_weights=takes_weights, needs_keyset=needs_keyset)
    exec(_compiled(text, f"<precast: {op.name} on {op.device_type}>"), namespace)
    written: DispatcherKernel = namespace["entry_point"]
    namespace["skip"] = int(needs_keyset)
    namespace["plain"] = _twin(written)
    return _torch.never_compiled(written)


@functools.cache
def _compiled(text: str, filename: str) -> CodeType:
    """The code of a kernel: to compile it is half of what putting a kernel on the dispatcher takes."""
    return compile(text, filename, "exec")


def watch(entry: DispatcherKernel, watcher: Watcher) -> None:
    """Has `watcher` called in place of a kernel, with the kernel itself, until `unwatch`."""
    entry.__globals__["watcher"] = watcher
    entry.__code__ = _watched.__code__


def unwatch(entry: DispatcherKernel) -> None:
    """Gives a kernel its own code back."""
    entry.__code__ = entry.__globals__["plain"].__code__


@_torch.runs_uncompiled
def _watched(*args: Any, **kwargs: Any) -> Any:
    """The code of a kernel that is watched; the names are looked up where the kernel's own are."""
    return watcher(op, plain, args, kwargs, skip)  # type: ignore[name-defined]  # noqa: F821


def _twin(written: DispatcherKernel) -> DispatcherKernel:
    twin = FunctionType(written.__code__, written.__globals__, "plain", written.__defaults__)
    return _torch.never_compiled(cast(DispatcherKernel, twin))


def source(op: Operation, *, takes_weights: bool, needs_keyset: bool) -> str:
    """The Python source of the kernel for `op`; arguments up to its last tensor have names, a0, a1 ..."""
    slots = op.tensor_slots if takes_weights else ()
    schema = _torch.schema_of(op.overload).arguments
    count = max(slots, default=-1) + 1
    positional = [a for a in schema if not a.kwarg_only]
    rest = ["*rest"] if len(positional) > count else []
    keywords = ["**kwargs"] if len(schema) > len(positional) else []
    parameters = [
        f"a{i}=default{i}" if schema[i].has_default_value() else f"a{i}" for i in range(count)
    ]
    originals = [f"a{i}" for i in range(count)]
    swapped = [f"b{i}" if i in slots else f"a{i}" for i in range(count)]
    attempt = _ATTEMPT_WITH_AUTOCAST_ON if needs_keyset else _ATTEMPT
    return _ENTRY_POINT.format(
        parameters=", ".join(
            [*(["keyset"] if needs_keyset else []), *parameters, *rest, *keywords]
        ),
        arguments=", ".join([*originals, *rest, *keywords]),
        positional="".join(f"{argument}, " for argument in [*originals, *rest]),
        keywords="kwargs" if keywords else "{}",
        attempt=attempt.format(swapped=", ".join([*swapped, *rest, *keywords])),
        swap=_swap(op, slots) if slots else "",
    )


def _swap(op: Operation, slots: tuple[int, ...]) -> str:
    # Copies have names of their own: where dtypes are promoted, it is the weight that is, not its rounded copy.
    schema = _torch.schema_of(op.overload).arguments
    head = _SWAP.format(
        copies=", ".join(f"b{i}" for i in slots),
        originals=", ".join(f"a{i}" for i in slots),
        use_held=_USE_HELD + (" and not capturing()" if op.device_type == "cuda" else ""),
    )
    # From the last to the first, as PyTorch casts: backward comes by the weights in the other order, and so do hooks.
    return head + "".join(
        _replacement(f"a{i}", f"b{i}", str(schema[i].type)) for i in reversed(slots)
    )


def _replacement(a: str, b: str, kind: str) -> str:
    if "List[" in kind:
        return _TENSORS.format(a=a, b=b)
    condition = f"{a}.dtype is float32"
    if kind != "Tensor":
        condition = f"{a} is not None and {condition}"
    return _TENSOR.format(a=a, b=b, condition=condition, fresh=fresh_expression("entry", a))


def _weight(cache: WeightCache, value: Any, dtype: torch.dtype, device_type: str) -> Any:
    """The cached copy of a weight on the region's device; anything else as it is."""
    if type(value) is list:
        return [_weight(cache, item, dtype, device_type) for item in value]
    cast = cache.cast(value, dtype, device_type)
    return value if cast is None else cast
