"""What one call of a PyTorch function does with weights: casts them, makes views of them, or computes with them.

Invariants:

- a function that is an operation with the rule `lower` casts every weight, whatever its other arguments are, so it is
  known by its name alone. Every other function is watched while it runs once for each kind of arguments;
- a weight counts as cast only if nothing but casts to 16 bits read its numbers, and if the function gives the same bits
  and dtypes when it is given the 16-bit weight itself;
- the arguments of the program are never written twice.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from precast import _torch
from precast._internal.pytree import map_tensors, tensors_in
from precast._torch import ObservingMode
from precast.engine.operator_kinds import kind_of
from precast.engine.thread_state import installed, thread_state
from precast.errors import PolicyError
from precast.policy.policy import Policy, Rule
from precast.policy.rows import FLOAT8_RULES

__all__ = [
    "LOW",
    "Uses",
    "address",
    "casts_by_rule",
    "describe",
    "is_same",
    "lowers",
    "quantises",
    "region_dtype",
    "watched",
]

LOW: Final = frozenset({torch.bfloat16, torch.float16})
"""The dtypes that weights are stored in instead of float32."""

_BUILT_IN: Final = (types.BuiltinFunctionType, types.MethodDescriptorType)


@dataclass
class Uses:
    """What happened to a weight.

    Attributes:
        dtypes: the 16-bit dtypes that it was cast to.
        computed: what used its float32 numbers otherwise.
        refused: what could not have taken 16-bit numbers, although it only cast these.
    """

    dtypes: set[torch.dtype] = field(default_factory=set)
    computed: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def note(self, what: str) -> None:
        """Notes something that computes in float32."""
        if what not in self.computed:
            self.computed.append(what)


def region_dtype(device_type: str) -> torch.dtype | None:
    """What the region in force casts to on a device type; None where autocast is off."""
    if not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def lowers(func: Any, device_type: str) -> bool:
    """Whether a function is an operation that casts its arguments to 16 bits under the policy in force."""
    known = _LOWERS.get((func, thread_state(device_type).state.number.value))
    if known is None:
        known = _is_lowered_here(func, device_type)
    # Transforms take operations apart before autocast sees them (2.13).
    return known and not _torch.is_functorch_active()


_LOWERS: Final[dict[tuple[Any, ...], bool]] = {}
"""A function and the policy in force -> whether it lowers the function. No two bound policies have the same number."""
_MOST_KNOWN: Final = 4096


def _is_lowered_here(func: Any, device_type: str) -> bool:
    """The same, for a policy of which it may not be known yet."""
    bound = thread_state(device_type).state.bound_policy
    outside = installed(device_type).bound_policy
    key: tuple[Any, ...]
    if bound is not None:
        key, policy = (func, bound.number), bound.policy
    else:
        policy = Policy.load("torch") if outside is None else outside.policy
        key = func, device_type, policy.fingerprint
    known = _LOWERS.get(key)
    if known is None:
        if len(_LOWERS) >= _MOST_KNOWN:
            _LOWERS.clear()
        known = _LOWERS[key] = _is_lowered(policy, func, device_type)
    return known


def casts_by_rule(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device_type: str
) -> bool:
    """Whether a function is an operation that casts its eligible arguments, all of which are tensors of their own."""
    if not lowers(func, device_type) or "out" in kwargs:
        return False
    return all(map(_is_plain, args)) and all(map(_is_plain, kwargs.values()))


def _is_lowered(policy: Policy, func: Any, device_type: str) -> bool:
    return _rule(policy, func, device_type) is Rule.LOWER


def quantises(func: Any, device_type: str) -> bool:
    """Whether a function is an operation that the policy in force has in 8 bits."""
    bound = thread_state(device_type).state.bound_policy
    return bound is not None and _rule(bound.policy, func, device_type) in FLOAT8_RULES


def _rule(policy: Policy, func: Any, device_type: str) -> Rule | None:
    """The rule of the operation that a function is; None where it is none, or its overloads differ."""
    if type(func) not in _BUILT_IN:
        return None
    for name in (func.__name__, f"{func.__name__}.default"):  # other overloads take a dtype more
        try:
            return policy.resolve(name, device_type).rule
        except PolicyError:
            continue
    return None


def _is_plain(argument: Any) -> bool:
    """Whether an argument leaves a rule as it is: a list may hold tensors, and float64 is never cast."""
    if isinstance(argument, Tensor):
        return argument.dtype is not torch.float64
    if isinstance(argument, list | dict):
        return not tensors_in(argument)
    return not isinstance(argument, torch.dtype)


class _Watch(ObservingMode):
    """Sees which operations read the memory of some tensors."""

    def __init__(self, watched_tensors: dict[int, Uses]) -> None:
        super().__init__()
        self._watched = watched_tensors

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        found = [t for t in tensors_in((args, kwargs)) if address(t) in self._watched]
        for tensor in found:
            _classify(self._watched[address(tensor)], func, tensor, out)
        return out


def _classify(uses: Uses, func: Any, tensor: Tensor, out: Any) -> None:
    kind = kind_of(func)
    if kind.is_view:
        return
    if kind.base == "_to_copy" and out.dtype in LOW and out.stride() == tensor.stride():
        uses.dtypes.add(out.dtype)
    else:
        uses.note(kind.name)


def address(tensor: Tensor) -> int:
    """Return the address of a tensor's memory; 0 where it has none of its own."""
    if not _torch.is_plain(type(tensor)) or _torch.is_functorch_wrapper(tensor):
        return 0
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return 0
    return tensor.untyped_storage().data_ptr()


def watched(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    weights: list[Tensor],
) -> tuple[Any, dict[int, Uses], bool]:
    """Calls a function with float32 weights, and sees what it does with each.

    Args:
        func: the function.
        args: its arguments, with the weights in their places.
        kwargs: its keyword arguments, likewise.
        weights: the float32 tensors that are watched.

    Returns:
        What it returned; for the address of each weight's memory what was done with it; and whether all that it
        returned are views of these weights.
    """
    by_address = {address(t): Uses() for t in weights}
    # A dispatch mode sees composite operations of inference tensors whole, and not the casts in them (2.13).
    with torch.inference_mode(False), torch.no_grad(), _Watch(by_address):
        args, kwargs = map_tensors(args, _counted), map_tensors(kwargs, _counted)
        result = func(*args, **kwargs)
    uses = {place: found for place, found in by_address.items() if place}
    returned = tensors_in(result)
    is_view = bool(returned) and all(address(t) in uses for t in returned)
    if not is_view and not any(found.computed for found in uses.values()):
        _check_low(func, args, kwargs, result, uses)
    return result, uses, is_view


def _counted(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.is_inference() else tensor


def _check_low(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
    uses: dict[int, Uses],
) -> None:
    """Notes where the function does not do the same with weights that are cast already."""
    dtypes = set().union(*(found.dtypes for found in uses.values()))
    name = describe(func)
    if len(dtypes) > 1 or name.endswith("_") or "out" in kwargs:
        problem: str | None = "which casts to several dtypes or writes to its arguments"
    else:
        dtype = next(iter(dtypes), torch.bfloat16)
        low = _lowering(set(uses), dtype)
        problem = _difference(func, (map_tensors(args, low), map_tensors(kwargs, low)), result)
    if problem is not None:
        for found in uses.values():
            found.refused.append(f"{name}, {problem}")


def _lowering(places: set[int], dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.to(dtype) if address(tensor) in places else tensor


def _difference(
    func: Callable[..., Any], call: tuple[tuple[Any, ...], dict[str, Any]], result: Any
) -> str | None:
    """How a call with weights that are cast already differs from its result; None where it does not."""
    args, kwargs = call
    try:
        low = func(*args, **kwargs)
    except Exception as error:
        return f"which refuses 16-bit weights here ({type(error).__name__})"
    return None if is_same(result, low) else "whose result depends on the dtype of the weight"


def is_same(one: Any, other: Any) -> bool:
    """Whether two results have the same tensors, bit for bit, or are the same values."""
    ours, theirs = tensors_in(one), tensors_in(other)
    if not ours and not theirs:
        return bool(one == other)
    return len(ours) == len(theirs) and all(map(_is_same_tensor, ours, theirs))


def _is_same_tensor(one: Tensor, other: Tensor) -> bool:
    if one.dtype is not other.dtype or one.shape != other.shape:
        return False
    if one.is_floating_point():  # NaN is equal to itself here, and 0 is not -0
        size = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
        one, other = one.contiguous().view(size), other.contiguous().view(size)
    return torch.equal(one, other)


def describe(func: Any) -> str:
    """A function's name for people."""
    owner = getattr(func, "__self__", None)
    name = getattr(func, "__name__", None) or str(func)
    return getattr(owner, "__name__", name) if name in ("__get__", "__set__") else str(name)
