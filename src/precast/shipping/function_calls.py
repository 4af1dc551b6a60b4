"""Observation of the weights in one call of a PyTorch function: casts, views, and other uses.

Invariants:

- a function that is an operation with the rule `lower` casts every weight, whatever its other arguments are, so its
  name is enough. Every other function is observed once for each kind of arguments;
- a weight counts as cast only if all reads of its values are casts to 16 bits, and the function gives the same bits and
  dtypes with the 16-bit weight;
- the arguments of the program are not written twice.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from precast import _torch
from precast._internal.pytree import map_tensors, tensors_in
from precast._torch import ObservingMode
from precast.engine.operator_kinds import kind_of
from precast.engine.thread_state import installed, thread_state
from precast.errors import PolicyError
from precast.policy.policy import Policy, Rule
from precast.policy.rows import FLOAT8_RULES

__all__ = [
    "UseRecorder",
    "WeightUses",
    "address",
    "casts_by_rule",
    "counted",
    "describe",
    "has_float8_rule",
    "is_same",
    "lowers",
    "makes_parameter",
    "observed_call",
    "region_dtype",
]

_BUILT_IN: Final = (types.BuiltinFunctionType, types.MethodDescriptorType)


@dataclass
class WeightUses:
    """The uses of one weight.

    Attributes:
        dtypes: the 16-bit dtypes that it was cast to.
        computed: the operations that read its float32 values otherwise.
        refused: the functions that only cast it, but behave differently with 16-bit weights.
    """

    dtypes: set[torch.dtype] = field(default_factory=set)
    computed: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def add_computed(self, operation: str) -> None:
        """Add an operation that computes in float32."""
        if operation not in self.computed:
            self.computed.append(operation)


def region_dtype(device_type: str) -> torch.dtype | None:
    """Return the lower precision of the region in force on a device type; None if autocast is off."""
    if not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def lowers(func: Any, device_type: str) -> bool:
    """Return True if a function is an operation that casts its arguments to 16 bits under the policy in force."""
    state = thread_state(device_type).state
    is_lowered = _LOWERS.get((func, state.number.value))
    if is_lowered is None:
        bound = state.bound_policy or installed(device_type).bound_policy
        key = func, device_type if bound is None else bound.number
        is_lowered = _LOWERS.get(key)
        if is_lowered is None:
            if len(_LOWERS) >= _MOST_ENTRIES:
                _LOWERS.clear()
            policy = Policy.load("torch") if bound is None else bound.policy
            is_lowered = _LOWERS[key] = _rule(policy, func, device_type) is Rule.LOWER
    # Transforms decompose operations before autocast handles them (2.13).
    return is_lowered and not _torch.is_functorch_active()


_LOWERS: Final[dict[tuple[Any, int | str], bool]] = {}
"""Maps a function and the number of the policy in force, or a device type, to True if the policy lowers it."""
_MOST_ENTRIES: Final = 4096


def casts_by_rule(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device_type: str
) -> bool:
    """Return True if a function is an operation that casts its eligible arguments, which are plain tensors."""
    is_cast = "out" not in kwargs and lowers(func, device_type)
    return is_cast and all(map(_is_plain, (*args, *kwargs.values())))


def has_float8_rule(func: Any, device_type: str) -> bool:
    """Return True if a function is an operation with a float8 rule in the policy in force."""
    bound = thread_state(device_type).state.bound_policy
    return bound is not None and _rule(bound.policy, func, device_type) in FLOAT8_RULES


def _rule(policy: Policy, func: Any, device_type: str) -> Rule | None:
    """Return the rule for a function; None if it is not an operation, or its overloads have different rules."""
    if type(func) not in _BUILT_IN:
        return None
    # Other overloads have a dtype argument.
    for name in (func.__name__, f"{func.__name__}.default"):
        try:
            return policy.resolve(name, device_type).rule
        except PolicyError:
            continue
    return None


def _is_plain(argument: Any) -> bool:
    """Return True if an argument does not change a rule: a list may hold tensors, and float64 is never cast."""
    if isinstance(argument, Tensor):
        return argument.dtype is not torch.float64
    if isinstance(argument, list | dict):
        return not tensors_in(argument)
    return not isinstance(argument, torch.dtype)


_TRILINEAR: Final = _torch.find_overload("aten::_trilinear")


class UseRecorder(ObservingMode):
    """Records the operations that read the memory of some tensors."""

    def __init__(
        self, uses: dict[int, WeightUses], casting: list[str], *, any_layout: bool = False
    ) -> None:
        super().__init__()
        self._uses, self._casting, self._any_layout = uses, casting, any_layout

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = tensors_in((args, kwargs))
        if (
            func is _TRILINEAR
        ):  # below the autocast keys, the operations that it calls would not be cast
            return _torch.redispatch_in_mode(self, func, tensors, (args, kwargs), self._casting)
        out = func(*args, **kwargs)
        for tensor in tensors:
            uses = self._uses.get(address(tensor))
            kind = kind_of(func)
            if uses is None or kind.is_view:
                continue
            is_low = kind.base == "_to_copy" and out.dtype in _torch.SIXTEEN_BIT
            if is_low and (self._any_layout or out.stride() == tensor.stride()):
                uses.dtypes.add(out.dtype)
            else:
                uses.add_computed(kind.name)
        return out


def address(tensor: Tensor) -> int:
    """Return the address of a tensor's memory; 0 if it has none."""
    if not _torch.is_plain(type(tensor)) or _torch.is_functorch_wrapper(tensor):
        return 0
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return 0
    return tensor.untyped_storage().data_ptr()


def observed_call(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], weights: list[Tensor]
) -> tuple[Any, dict[int, WeightUses], bool]:
    """Call a function with float32 weights among its arguments, and record the uses of each.

    Return the result; the uses by the address of each weight's memory; and True if all tensors in the result are views
    of these weights.
    """
    by_address = {address(t): WeightUses() for t in weights}
    casting = [device for device in {weights[0].device.type} if torch.is_autocast_enabled(device)]
    # A dispatch mode gets composite operations of inference tensors as a whole, without their casts (2.13).
    with torch.inference_mode(False), torch.no_grad(), UseRecorder(by_address, casting):
        args, kwargs = map_tensors(args, counted), map_tensors(kwargs, counted)
        result = func(*args, **kwargs)
    uses = {place: use for place, use in by_address.items() if place}
    returned = tensors_in(result)
    is_view = bool(returned) and all(address(t) in uses for t in returned)
    if not is_view and not any(use.computed for use in uses.values()):
        _check_low(func, args, kwargs, result, uses)
    return result, uses, is_view


def counted(tensor: Tensor) -> Tensor:
    """Return a tensor with a version counter: inference tensors are copied."""
    return tensor.clone() if tensor.is_inference() else tensor


def _check_low(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
    uses: dict[int, WeightUses],
) -> None:
    """Add the function to `refused` if its result differs with weights that are cast already."""
    dtypes = set().union(*(use.dtypes for use in uses.values()))
    name, problem = describe(func), ""

    def low(tensor: Tensor) -> Tensor:
        return tensor.to(next(iter(dtypes), torch.bfloat16)) if address(tensor) in uses else tensor

    if len(dtypes) > 1 or name.endswith("_") or "out" in kwargs:
        problem = "which casts to several dtypes or writes to its arguments"
    else:
        try:
            again = func(*map_tensors(args, low), **map_tensors(kwargs, low))
        except Exception as error:
            problem = f"which refuses 16-bit weights here ({type(error).__name__})"
        else:
            if not is_same(result, again):
                problem = "whose result depends on the dtype of the weight"
    for use in uses.values() if problem else ():
        use.refused.append(f"{name}, {problem}")


def is_same(one: Any, other: Any) -> bool:
    """Return True if two results have the same tensors, bit for bit, or are equal values."""
    ours, theirs = tensors_in(one), tensors_in(other)
    if not ours and not theirs:
        return bool(one == other)
    return len(ours) == len(theirs) and all(map(_is_same_tensor, ours, theirs))


def _is_same_tensor(one: Tensor, other: Tensor) -> bool:
    if one.dtype is not other.dtype or one.shape != other.shape:
        return False
    if one.is_floating_point():  # compares bits: NaN equals itself, and 0 differs from -0
        size = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
        one, other = one.contiguous().view(size), other.contiguous().view(size)
    return torch.equal(one, other)


def makes_parameter(frame: types.FrameType | None) -> bool:
    """Return True for a frame that `nn.Parameter(...)` has called: `detach` must return an object of its own class."""
    caller = frame and frame.f_back
    return caller is not None and caller.f_code is nn.Parameter.__new__.__code__


def describe(func: Any) -> str:
    """Return a function's name for messages."""
    owner = getattr(func, "__self__", None)
    name = getattr(func, "__name__", None) or str(func)
    if name in ("__get__", "__set__"):
        return str(getattr(owner, "__name__", name))
    return str(owner.name if isinstance(owner, torch.jit.ScriptFunction) else name)
