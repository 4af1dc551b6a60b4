"""One function a rule: each makes the kernel that gives an operation that rule inside a region.

Invariants:

- these kernels are the reference: plain Python, from the operator and the region's dtype alone. `engine`
  replaces them by PyTorch's compiled kernels where both mean the same;
- which tensors a rule may cast, and how the operation then runs, is `Operation`'s to say: every rule is only a
  choice of dtype.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from precast import _torch
from precast._internal import events
from precast._internal.pytree import tensors_in
from precast._torch import Kernel as DispatcherKernel
from precast.engine.float8_kernels import RECIPES, float8_kernel
from precast.engine.operation import Convert, Operation
from precast.engine.thread_state import Kernel, ThreadState, regions, thread_state
from precast.errors import BannedOperationError
from precast.policy.policy import Rule
from precast.weights import held, unversioned_writes
from precast.weights.float8.formats import Recipe

__all__ = ["attempting", "kernel_for", "noting", "promoting"]

_F32: Final = torch.float32
_ABOUT_DTYPES: Final = re.compile(
    r"[dD]types?\b|dtype|[Ss]calar ?[Tt]ype|(same|result|input|different|mixed) types?\b|not implemented for '"
    r"|\b(Half|BFloat16|Float|Double)\b"
)
"""What PyTorch's operations say of dtypes that they do not take together (2.11 to 2.15)."""


def kernel_for(rule: Rule, op: Operation) -> Kernel:
    """The reference kernel of `op` under `rule`."""
    return _KERNELS[rule](op)


def _keep(op: Operation) -> Kernel:
    """KEEP: as if there were no region."""
    return lambda _keyset, args, kwargs: op.call(args, kwargs)


def _fallthrough(op: Operation) -> Kernel:
    """FALLTHROUGH: as if nothing were at the autocast key, which stays on for what the operation calls."""
    below = _torch.fallthrough(op.overload, op.device_type)
    return lambda keyset, args, kwargs: below(keyset, *args, **kwargs)


def _lower(op: Operation) -> Kernel:
    """LOWER: eligible tensors in the region's lower precision, weights from the cache."""
    return lambda _keyset, args, kwargs: op.call_cast(_to_lower(op), args, kwargs)


def _to_lower(op: Operation) -> Convert:
    """Casts to the region's lower precision, for one call: eligible tensors, with weights from the cache."""
    dtype = op.lower_dtype()
    if held.held_parameters:
        _count_use(thread_state(op.device_type).state)
    cached = regions.cache.cast if torch.is_autocast_cache_enabled() else _no_cache

    def convert(tensor: Tensor) -> Tensor:
        if not op.eligible(tensor) or tensor.dtype is dtype:
            return tensor
        weight = cached(tensor, dtype, op.device_type)
        return _torch.cast_without_torch_function(tensor, dtype) if weight is None else weight

    return convert


def _count_use(here: ThreadState) -> None:
    here.uses += 1
    if here.uses >= unversioned_writes.USES_BETWEEN_CHECKS:
        here.uses = 0
        unversioned_writes.check_within_region()


def _fp32(op: Operation) -> Kernel:
    """FP32: eligible tensors in float32."""
    return lambda _keyset, args, kwargs: op.call_cast(_to(_F32, op.eligible), args, kwargs)


def _fp32_set_dtype(op: Operation) -> Kernel:
    """FP32_SET_DTYPE: no cast; an unset `dtype` argument becomes float32 where the first tensor is eligible."""
    position = op.argument_names.index("dtype")

    def run(_keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not op.eligible(args[0] if args else None):
            return op.call(args, kwargs)
        if len(args) <= position:
            kwargs = {**kwargs, "dtype": kwargs.get("dtype") or _F32}
        elif args[position] is None:
            args = (*args[:position], _F32, *args[position + 1 :])
        return op.call(args, kwargs)

    return run


def _fp32_append_dtype(op: Operation) -> Kernel:
    """FP32_APPEND_DTYPE: the overload with a dtype more: float32 where the first tensor is eligible."""
    longer, defaults = _overload_with_dtype(op)

    def run(_keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = [*args, *(kwargs.get(name, value) for name, value in defaults[len(args) :])]
        dtype = _F32 if op.eligible(args[0]) else args[0].dtype
        return longer.call(given, {"dtype": dtype})

    return run


def _promote(op: Operation) -> Kernel:
    """PROMOTE: eligible tensors in the widest of their dtypes: the region's lower precision or float32."""

    def run(_keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        lower = widest = op.lower_dtype()
        for tensor in tensors_in((args, kwargs)):
            if not op.eligible(tensor):
                continue
            # As in PyTorch the order counts: what comes after a float32 is never asked for its dtype.
            if _F32 in (widest, tensor.dtype):
                widest = _F32
            elif tensor.dtype is not lower:
                raise RuntimeError(
                    f"Unexpected floating dtype {tensor.dtype} for {op.name} in a {lower} region: "
                    f"the rule 'promote' knows {lower} and torch.float32. Cast it first, or use a "
                    'policy with mixed = "promote".'
                )
        return op.call_cast(_to(widest, op.eligible), args, kwargs)

    return run


def _banned(op: Operation) -> Kernel:
    """BANNED: refuses, with advice."""

    def run(_keyset: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        raise BannedOperationError(
            f"{op.name} is banned in an autocast region on {op.device_type}: rounded to 16 bits, a "
            "probability near 0 or 1 becomes 0 or 1, and its logarithm infinite. Use "
            "binary_cross_entropy_with_logits (which takes the values before the sigmoid), or a "
            'region with enabled=False, or the policy "default", which runs it in float32.'
        )

    return run


def _float8(recipe: Recipe, op: Operation) -> Kernel:
    """FLOAT8 and its kin: two matrices in 8 bits, the result in the region's lower precision."""
    return float8_kernel(op, recipe, _lower(op), lambda: _to_lower(op))


_KERNELS: Final[dict[Rule, Callable[[Operation], Kernel]]] = {
    Rule.KEEP: _keep,
    Rule.FALLTHROUGH: _fallthrough,
    Rule.LOWER: _lower,
    Rule.FP32: _fp32,
    Rule.FP32_SET_DTYPE: _fp32_set_dtype,
    Rule.FP32_APPEND_DTYPE: _fp32_append_dtype,
    Rule.PROMOTE: _promote,
    Rule.BANNED: _banned,
    **{rule: functools.partial(_float8, recipe) for rule, recipe in RECIPES.items()},
}


def promoting(op: Operation, inner: Kernel) -> Kernel:
    """`inner` first; where that raises on mixed floating dtypes, again with all of them in the widest."""

    def run(keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return inner(keyset, args, kwargs)
        except RuntimeError as error:
            return retry_promoted(op, error, args, kwargs)

    return run


def attempting(op: Operation, native_kernel: DispatcherKernel) -> Kernel:
    """What runs without precast first; where that raises on mixed floating dtypes, `op` with all in the widest.

    Autocast stays on in what it calls: what is promoted is the outermost operation, so that its result has the widest
    dtype.
    """

    def run(keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        here = thread_state(op.device_type).state
        here.attempts += 1
        try:
            return native_kernel(keyset, *args, **kwargs)
        except RuntimeError as error:
            failure = error
        finally:
            here.attempts -= 1
        return retry_promoted(op, failure, args, kwargs)

    return run


def retry_promoted(
    op: Operation, error: RuntimeError, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Runs `op` once more with its floating tensors in their widest dtype; raises `error` where that is no way out.

    Only where the error is about dtypes: what failed for another reason may have done a part of its work. PyTorch's own
    operations look at dtypes before they write; of others nobody knows, so what writes to its arguments runs once.
    """
    if not _ABOUT_DTYPES.search(str(error)) or (op.written and not op.name.startswith("aten::")):
        raise error
    promotable = functools.partial(_promotable, op)
    floating = {t.dtype for t in tensors_in((args, kwargs)) if promotable(t)}
    if len(floating) < 2 or thread_state(op.device_type).state.is_attempt():
        raise error
    try:
        return op.call_cast(_to(_widest(floating), promotable), args, kwargs)
    except RuntimeError:
        raise error from None


def noting(op: Operation, message: str, inner: Kernel) -> Kernel:
    """`inner`, telling observers about it."""
    note = events.OperationNote(op=op.name, device=op.device_type, message=message)

    def run(keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        events.emit(note)
        return inner(keyset, args, kwargs)

    return run


def _no_cache(_tensor: Tensor, _dtype: torch.dtype, _device_type: str) -> None:
    return None


def _to(dtype: torch.dtype, wanted: Callable[[Tensor], bool]) -> Convert:
    """Casts the tensors that are `wanted`; those that have the dtype stay themselves."""
    return lambda t: (
        _torch.cast_without_torch_function(t, dtype) if t.dtype is not dtype and wanted(t) else t
    )


def _promotable(op: Operation, tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.device.type == op.device_type


def _widest(dtypes: set[torch.dtype]) -> torch.dtype:
    widest, *rest = dtypes
    for dtype in rest:
        widest = torch.promote_types(widest, dtype)
    return widest


def _overload_with_dtype(op: Operation) -> tuple[Operation, list[tuple[str, Any]]]:
    """The overload of `op` that takes the same arguments and a dtype, and the defaults of `op`'s own."""
    operation = op.name.partition(".")[0]
    wanted = (*op.argument_names, "dtype")
    for name, schema in _torch.operator_overloads(operation).items():
        if tuple(a.name for a in schema.arguments) == wanted:
            overload = _torch.find_overload(f"{operation}.{name}")
            assert overload is not None
            defaults = [
                (a.name, a.default_value if a.has_default_value() else None)
                for a in _torch.schema_of(op.overload).arguments
            ]
            return replace(op, name=f"{operation}.{name}", overload=overload), defaults
    raise AssertionError(f"{op.name} has no overload that takes a dtype")  # policies check this
