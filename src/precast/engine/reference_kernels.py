"""The reference kernels: one function per rule, which returns the kernel of an operation with that rule.

Invariants:

- these kernels define the meaning of the rules, in plain Python. `registration` replaces them by PyTorch's compiled
  kernels where the results are the same;
- `Operation` decides which tensors may be cast and how the operation runs; a rule only selects dtypes.
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
from precast.engine.product_kernels import product_kernel
from precast.engine.thread_state import Kernel, ThreadState, regions, thread_state
from precast.errors import BannedOperationError
from precast.policy.mixed_dtypes import refuses_mixtures
from precast.policy.policy import Rule
from precast.policy.rows import FLOAT8_RULES
from precast.weights import held, unversioned_writes
from precast.weights.float8.formats import Recipe

__all__ = [
    "DERIVATIVE_REFUSES",
    "dtypes_to_promote",
    "kernel_for",
    "with_attempt",
    "with_note",
    "with_promotion",
]

_F32: Final = torch.float32
_F64: Final = torch.float64
_ABOUT_DTYPES: Final = re.compile(
    r"d?types?\b|scalar ?type|not implemented for '|\b(half|bfloat16|float|double)\b", re.IGNORECASE
)
"""The words about dtypes in messages of extensions, whose refusals no table has."""
_NO_KERNEL: Final = "could not create a primitive"
"""The error of oneDNN on a processor for which it has no 16-bit kernel (2.13)."""
_LOWERED: Final = (Rule.LOWER, Rule.LOWER_OUT_FP32, Rule.FP32, *FLOAT8_RULES)
"""The rules that cast all eligible tensors to one dtype."""

_MIXED_FORWARD_ONLY: Final = frozenset({"aten::native_layer_norm", "aten::native_group_norm"})
"""Operations that take mixed dtypes, but whose derivative under `torch.func` (per-sample gradients) raises (2.13)."""


DERIVATIVE_REFUSES: Final = frozenset(
    {"aten::addr", "aten::_sparse_addmm", "aten::special_i1", "aten::special_i1e"}
)
"""Operations whose derivative raises on dtypes that they take: mixed ones, or bfloat16, as of the last two (2.13)."""


def kernel_for(rule: Rule, op: Operation) -> Kernel:
    """Return the reference kernel of `op` with `rule`."""
    return _KERNELS[rule](op)


def _keep(op: Operation) -> Kernel:
    """KEEP: run as outside of all regions."""
    return lambda _keyset, args, kwargs: op.call(args, kwargs)


def _fallthrough(op: Operation) -> Kernel:
    """FALLTHROUGH: skip the autocast key, and leave autocast on for the operations inside."""
    below = _torch.fallthrough(op.overload, op.device_type)
    return lambda keyset, args, kwargs: below(keyset, *args, **kwargs)


def _lower(op: Operation) -> Kernel:
    """LOWER: cast eligible tensors to the region's lower precision, weights by the cache."""
    if op.name == "aten::_grouped_mm":
        return _lower_groups(op)
    return lambda _keyset, args, kwargs: op.call_cast(_to_lower(op), args, kwargs)


def _lower_groups(op: Operation) -> Kernel:
    """LOWER for `_grouped_mm`; FP32 where its kernels refuse 16 bits: rows of no multiple of 16 bytes (2.13)."""
    in_float32 = _fp32(op)

    def run(keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        a, b = args[:2]
        if any(size % 8 for size in (a.shape[-1], *b.shape[-2:])):
            return in_float32(keyset, args, kwargs)
        return op.call_cast(_to_lower(op), args, kwargs)

    return run


def _to_lower(op: Operation) -> Convert:
    """Return the cast of `lower` for one call: eligible tensors, weights by the cache."""
    dtype = op.lower_dtype()
    if held.held_parameters:
        _count_weight_use(thread_state(op.device_type).state)
    cached = regions.cache.cast if torch.is_autocast_cache_enabled() else _no_cache
    if _torch.function_modes():  # an interpreter of TorchScript leaves the program's modes on
        cached = _torch.unseen_by_modes(cached)

    def convert(tensor: Tensor) -> Tensor:
        if not op.eligible(tensor) or tensor.dtype is dtype:
            return tensor
        weight = cached(tensor, dtype, op.device_type)
        return _torch.cast_without_torch_function(tensor, dtype) if weight is None else weight

    return convert


def _count_weight_use(state: ThreadState) -> None:
    state.uses += 1
    if state.uses >= unversioned_writes.USES_BETWEEN_CHECKS:
        state.uses = 0
        unversioned_writes.check_within_region()


def _fp32(op: Operation) -> Kernel:
    """FP32: cast eligible tensors to float32."""
    return lambda _keyset, args, kwargs: op.call_cast(_cast_to(_F32, op.eligible), args, kwargs)


def _fp32_set_dtype(op: Operation) -> Kernel:
    """FP32_SET_DTYPE: cast nothing; set an unset `dtype` argument to float32 if the first tensor is eligible."""
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
    """FP32_APPEND_DTYPE: call the overload with a `dtype` argument: float32 if the first tensor is eligible."""
    longer, defaults = _overload_with_dtype(op)

    def run(_keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values = [*args, *(kwargs.get(name, value) for name, value in defaults[len(args) :])]
        dtype = _F32 if op.eligible(args[0]) else args[0].dtype
        return longer.call(values, {"dtype": dtype})

    return run


def _fp32_if_refused(op: Operation) -> Kernel:
    """FP32_IF_REFUSED: run unchanged; if PyTorch refuses 16-bit arguments, in float32."""
    below = _torch.fallthrough(op.overload, op.device_type)
    return with_attempt(op, below, Rule.FP32_IF_REFUSED)


def _promote(op: Operation) -> Kernel:
    """PROMOTE: cast eligible tensors to the widest of their dtypes: the region's lower precision or float32."""

    def run(_keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        lower = widest = op.lower_dtype()
        for tensor in tensors_in((args, kwargs)):
            if not op.eligible(tensor):
                continue
            # In PyTorch's order: once float32 is found, the dtypes of later tensors are not checked.
            if _F32 in (widest, tensor.dtype):
                widest = _F32
            elif tensor.dtype is not lower:
                raise RuntimeError(
                    "Unexpected floating ScalarType in at::autocast::prioritize\n"
                    f"{op.name} got {tensor.dtype} in a {lower} region: the rule 'promote' accepts {lower} and "
                    'torch.float32. Cast it first, or use a policy with mixed = "promote".'
                )
        return op.call_cast(_cast_to(widest, op.eligible), args, kwargs)

    return run


def _banned(op: Operation) -> Kernel:
    """BANNED: raise an error with advice."""

    def run(_keyset: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        raise BannedOperationError(
            f"{op.name} is banned in an autocast region on {op.device_type}: rounded to 16 bits, a "
            "probability near 0 or 1 becomes 0 or 1, and its logarithm infinite. Use "
            "binary_cross_entropy_with_logits (which takes the values before the sigmoid), or a "
            'region with enabled=False, or the policy "default", which runs it in float32.'
        )

    return run


def _lower_out_fp32(op: Operation) -> Kernel:
    """LOWER_OUT_FP32: multiply eligible tensors in the region's lower precision, return float32."""
    return product_kernel(op, _lower(op), lambda: _to_lower(op))


def _float8(recipe: Recipe, op: Operation) -> Kernel:
    """FLOAT8 and the other float8 rules: multiply in 8 bits, return the region's lower precision."""
    return float8_kernel(op, recipe, _lower(op), lambda: _to_lower(op))


_KERNELS: Final[dict[Rule, Callable[[Operation], Kernel]]] = {
    Rule.KEEP: _keep,
    Rule.FALLTHROUGH: _fallthrough,
    Rule.LOWER: _lower,
    Rule.LOWER_OUT_FP32: _lower_out_fp32,
    Rule.FP32: _fp32,
    Rule.FP32_SET_DTYPE: _fp32_set_dtype,
    Rule.FP32_APPEND_DTYPE: _fp32_append_dtype,
    Rule.FP32_IF_REFUSED: _fp32_if_refused,
    Rule.PROMOTE: _promote,
    Rule.BANNED: _banned,
    **{rule: functools.partial(_float8, recipe) for rule, recipe in RECIPES.items()},
}


def with_promotion(op: Operation, rule: Rule, inner: Kernel) -> Kernel:
    """Run `inner`, the kernel of `rule`; if it raises on mixed floating dtypes, rerun with all in the widest."""

    def run(keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return inner(keyset, args, kwargs)
        except RuntimeError as error:
            return retry_promoted(op, error, args, kwargs, rule)

    return run


def with_attempt(
    op: Operation, torch_kernel: DispatcherKernel, rule: Rule = Rule.FALLTHROUGH
) -> Kernel:
    """Run PyTorch's kernel; if it raises on mixed floating dtypes, rerun `op` with all of them in the widest.

    An operation that refuses every mixture runs once, in the widest. With the rule `fp32_if_refused`, 16-bit dtypes are
    rerun in float32.

    Autocast stays on for the operations inside: the outermost operation on mixed dtypes is promoted, so that its result
    has the widest dtype.
    """
    note = _note_of_refusal(op)
    refuses = rule is Rule.FALLTHROUGH and refuses_mixtures(op.name, op.device_type)

    def run(keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dtypes = dtypes_to_promote(_floating_dtypes(op, args, kwargs), rule, op.lower_dtype())
        if len(dtypes) < 2:
            return torch_kernel(keyset, *args, **kwargs)
        is_refused = refuses and not regions.numbers.attempts and _have_elements(args, kwargs)
        if is_refused or _derivative_refuses(op, args, kwargs):
            result = _promoted(op, dtypes, args, kwargs)
            if rule is Rule.FP32_IF_REFUSED:
                events.emit(note)
            return result
        regions.numbers.attempts += 1
        try:
            return torch_kernel(keyset, *args, **kwargs)
        except RuntimeError as error:
            failure = error
        finally:
            regions.numbers.attempts -= 1
        result = retry_promoted(op, failure, args, kwargs, rule)
        if rule is Rule.FP32_IF_REFUSED:
            events.emit(note)
        return result

    return run


def _note_of_refusal(op: Operation) -> events.OperationNote:
    message = "refused in 16 bits by PyTorch, ran in float32"
    return events.OperationNote(op=op.name, device_type=op.device_type, message=message)


def _derivative_refuses(op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if PyTorch would run an operation on such dtypes, and raise in its derivative."""
    if op.name in DERIVATIVE_REFUSES:
        return torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in((args, kwargs)))
    return op.name in _MIXED_FORWARD_ONLY and _torch.is_functorch_active()


def retry_promoted(
    op: Operation,
    error: RuntimeError,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    rule: Rule = Rule.FALLTHROUGH,
) -> Any:
    """Rerun `op` with its floating tensors in their widest dtype; raise `error` if that cannot help.

    An error is one about dtypes if there is none in the widest. PyTorch's own operations check dtypes before they
    write. For others this is unknown: those that write arguments run once, and so do those whose message has no word
    about dtypes.
    """
    dtypes = dtypes_to_promote(_floating_dtypes(op, args, kwargs), rule, op.lower_dtype())
    is_refused = rule in _LOWERED and _NO_KERNEL in str(error)
    is_sparse = any(t.layout is not torch.strided for t in tensors_in((args, kwargs)))
    if is_refused or (rule in _LOWERED and is_sparse):
        # Products of sparse matrices in 16 bits do not exist on each device, nor LSTMs on each processor.
        dtypes |= {op.lower_dtype(), _F32}
    is_pytorchs = op.name.startswith("aten::")
    runs_once = not is_pytorchs and (op.mutated or not _ABOUT_DTYPES.search(str(error)))
    is_of_device = isinstance(error, (torch.OutOfMemoryError, torch.AcceleratorError))
    if len(dtypes) < 2 or regions.numbers.attempts or runs_once or is_of_device:
        raise error
    try:
        result = _promoted(op, dtypes, args, kwargs)
    except RuntimeError:
        raise error from None
    if is_refused:
        events.emit(_note_of_refusal(op))
    return result


def _promoted(
    op: Operation, dtypes: set[torch.dtype], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run `op` with its floating tensors in the widest of several dtypes."""
    state = thread_state(op.device_type).state
    state.reruns += 1
    try:
        convert = _cast_to(_widest(dtypes), functools.partial(_promotable, op))
        return op.call_cast(convert, args, kwargs)
    finally:
        state.reruns -= 1


def _floating_dtypes(
    op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> set[torch.dtype]:
    return {t.dtype for t in tensors_in((args, kwargs)) if _promotable(op, t)}


def _have_elements(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if every floating tensor has several elements.

    PyTorch accepts some mixtures with a tensor of one or none. A size that is a symbol counts as several.
    """
    floating = (t for t in tensors_in((args, kwargs)) if t.is_floating_point())
    return all(not isinstance(n := t.numel(), int) or n > 1 for t in floating)


def dtypes_to_promote(own: set[torch.dtype], rule: Rule, lower: torch.dtype) -> set[torch.dtype]:
    """Return the dtypes of which the widest is that of all floating tensors: several if there is anything to promote.

    There is nothing to promote where the rule leaves one dtype.

    Args:
        own: the dtypes of the floating tensors.
        rule: the rule of the operation: `promote` adds the region's dtype if one of the tensors has another 16-bit one,
            `fp32_if_refused` adds float32 if one of them has 16 bits.
        lower: the region's dtype.
    """
    if rule is Rule.FP32_IF_REFUSED and not own.isdisjoint(_torch.SIXTEEN_BIT):
        return own | {_F32}
    if rule in _LOWERED:
        return own if _F64 in own else set()
    if rule is Rule.PROMOTE:
        if own <= {_F32, lower}:
            return set()
        return own if own <= {_F32, _F64, lower} else own | {lower}
    return own


def with_note(op: Operation, message: str, inner: Kernel) -> Kernel:
    """Run `inner` and emit an event about it."""
    note = events.OperationNote(op=op.name, device_type=op.device_type, message=message)

    def run(keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        events.emit(note)
        return inner(keyset, args, kwargs)

    return run


def _no_cache(_tensor: Tensor, _dtype: torch.dtype, _device_type: str) -> None:
    return None


def _cast_to(dtype: torch.dtype, condition: Callable[[Tensor], bool]) -> Convert:
    """Return a cast to a dtype of the tensors with a condition; a tensor with that dtype is returned itself."""
    return lambda t: (
        _torch.cast_without_torch_function(t, dtype) if t.dtype is not dtype and condition(t) else t
    )


def _promotable(op: Operation, tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.device.type == op.device_type


def _widest(dtypes: set[torch.dtype]) -> torch.dtype:
    widest, *rest = dtypes
    for dtype in rest:
        widest = torch.promote_types(widest, dtype)
    return widest


def _overload_with_dtype(op: Operation) -> tuple[Operation, list[tuple[str, Any]]]:
    """Return the overload of `op` with an additional dtype argument, and the defaults of `op`'s own arguments."""
    operation = op.name.partition(".")[0]
    expected = (*op.argument_names, "dtype")
    for name, schema in _torch.operator_overloads(operation).items():
        if tuple(a.name for a in schema.arguments) == expected:
            overload = _torch.find_overload(f"{operation}.{name}")
            assert overload is not None
            defaults = [
                (a.name, a.default_value if a.has_default_value() else None)
                for a in _torch.schema_of(op.overload).arguments
            ]
            return replace(op, name=f"{operation}.{name}", overload=overload), defaults
    raise AssertionError(f"{op.name} has no overload with a dtype")  # policies are checked for this
