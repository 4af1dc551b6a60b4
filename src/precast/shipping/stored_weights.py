"""Weights that are stored in 16 bits, and that make sure that this rounding shows in no result.

Invariants:

- in a region such a weight does for the model what its float32 original did: what casts it gives the same bits, what
  asks for its dtype is told float32, and what would compute with its float32 numbers raises an error that names it,
  because these numbers are gone;
- outside of all regions it is a parameter like any other in 16 bits, and says so;
- copies, pickles and views keep all this; a state dict has plain tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn

from precast import _torch
from precast._internal.pytree import map_tensors, tensors_in
from precast.attachment.weight_casts import METADATA
from precast.engine.thread_state import ThreadLocalState, thread_state
from precast.errors import ConversionError
from precast.shipping.function_calls import (
    address,
    casts_by_rule,
    describe,
    lowers,
    region_dtype,
    watched,
)

__all__ = ["Inside", "StoredBuffer", "StoredParameter", "StoredWeight", "inside"]

_MOST_CALLS: Final = 4096
"""Of how many kinds of calls it is remembered what they do with weights."""


class Inside(threading.local):
    """The converted models that run in this thread, the innermost last."""

    def __init__(self) -> None:
        self.models: list[nn.Module] = []


inside: Final = Inside()


class StoredWeight(Tensor):
    """What stored parameters and buffers have in common.

    Attributes:
        weight_name: the name in the model.
        stored_dtype: the dtype of its numbers, whatever `dtype` says in a region.
        device_type: where it was converted for.
        thread: what is in force there in the thread that asks.
        is_dense: whether its numbers lie in memory as a cast would put them; False where that is to be asked.
        plain: the same numbers in the same memory as a tensor of PyTorch's own class, which its functions take without
            asking anything; a weight that is given other memory gets another one.
    """

    is_dense: bool = False
    plain: Tensor
    weight_name: str
    stored_dtype: torch.dtype
    device_type: str
    thread: ThreadLocalState

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The dtype of the numbers; in a region float32, which the model was written and trained with."""
        if inside.models or torch.is_autocast_enabled(self.device_type):
            return torch.float32
        return self.stored_dtype

    def as_stored(self, plain: Tensor) -> Any:
        """A plain tensor with this weight's numbers, as a view of this weight."""
        view = plain.as_subclass(StoredBuffer)
        return _described(view, self.weight_name, plain.dtype, self.device_type)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with _torch.without_subclass_functions():
            if torch.compiler.is_dynamo_compiling():
                return func(*args, **(kwargs or {}))
            if func in _GIVE_OTHER_MEMORY:
                return _with_other_memory(func, args, kwargs or {})
            if not kwargs and _is_common(func, args):
                return func(*args)
            kwargs = kwargs or {}
            if func in METADATA:
                return func(*args, **kwargs)
            weights = _stored_in(args, kwargs)
            first = weights[0] if weights else None
            if first is None or not (inside.models or torch.is_autocast_enabled(first.device_type)):
                return func(*args, **kwargs)
            dtype = region_dtype(first.device_type)
            if casts_by_rule(func, args, kwargs, first.device_type) and all(
                _is_as_cast(weight, dtype) for weight in weights
            ):
                return func(*args, **kwargs)
            return _call(func, args, kwargs, weights)


def _is_common(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call is of the kind that models make most: tensors and whole parameters, which the region casts.

    It is asked in place of all other questions, to be done with them in 2 us.
    """
    device = None
    for value in args:
        kind = type(value)
        if kind is StoredParameter:
            if device is None:
                device = value.device_type
                if not torch.is_autocast_enabled(device):
                    return False
                dtype = torch.get_autocast_dtype(device)
            if not value.is_dense or value.stored_dtype is not dtype:
                return False
        elif kind is Tensor:
            if value.dtype is torch.float64:
                return False
        elif kind not in _NO_TENSORS:
            return False
    return device is not None and lowers(func, device)


_NO_TENSORS: Final = frozenset({type(None), int, float, bool, str, torch.Size})


_GIVE_OTHER_MEMORY: Final[frozenset[Any]] = frozenset(
    [Tensor.data.__set__]  # type: ignore[attr-defined]
    + [getattr(Tensor, name) for name in ("resize_", "resize_as_", "as_strided_", "t_")]
    + [getattr(Tensor, name) for name in ("transpose_", "swapaxes_", "swapdims_")]
    + [getattr(Tensor, name) for name in ("squeeze_", "unsqueeze_")]
)
"""What gives a tensor other memory, or lays the same out otherwise."""


def _with_other_memory(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = func(*args, **kwargs)
    weight = args[0]
    if isinstance(weight, StoredParameter):
        weight.take_note()
    return result


class StoredParameter(StoredWeight, nn.Parameter):
    """A parameter that is stored in 16 bits."""

    def __new__(cls, data: Tensor, name: str, device_type: str) -> StoredParameter:  # noqa: D102
        parameter = nn.Parameter.__new__(cls, data, False)
        described: StoredParameter = _described(parameter, name, data.dtype, device_type)
        described.take_note()
        return described

    def take_note(self) -> None:
        """Notes which memory the parameter has, and how its numbers lie there."""
        with _torch.without_subclass_functions():
            self.plain = self.data
            self.is_dense = self.plain.is_contiguous() or _is_dense(self.plain)

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """As of every tensor; this method alone does not ask `__torch_function__` (2.13)."""
        return _with_other_memory(Tensor.set_, (self, *args), kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _deep_copied(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return StoredParameter, (self.data, self.weight_name, self.device_type)


class StoredBuffer(StoredWeight):
    """A buffer, or a view of a weight, that is stored in 16 bits."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _deep_copied(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return stored_buffer, (self.data, self.weight_name, self.device_type)


def stored_buffer(data: Tensor, name: str, device_type: str) -> StoredBuffer:
    """A buffer with these 16-bit numbers."""
    described: StoredBuffer = _described(
        data.as_subclass(StoredBuffer), name, data.dtype, device_type
    )
    return described


def _described(weight: Any, name: str, dtype: torch.dtype, device_type: str) -> Any:
    weight.weight_name, weight.stored_dtype, weight.device_type = name, dtype, device_type
    weight.thread = thread_state(device_type)
    return weight


def _deep_copied(weight: StoredWeight, memo: dict[int, Any]) -> Any:
    if id(weight) not in memo:
        make = StoredParameter if isinstance(weight, StoredParameter) else stored_buffer
        numbers = weight.data.clone(memory_format=torch.preserve_format)
        memo[id(weight)] = make(numbers, weight.weight_name, weight.device_type)
    return memo[id(weight)]


def _stored_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[StoredWeight]:
    found = [value for value in args if isinstance(value, StoredWeight)]
    if kwargs or any(isinstance(value, list | tuple | dict) for value in args):
        found = [value for value in tensors_in((args, kwargs)) if isinstance(value, StoredWeight)]
    return found


def _is_as_cast(weight: StoredWeight, dtype: torch.dtype | None) -> bool:
    """Whether a weight's numbers lie in memory as a cast to `dtype` would put them."""
    if weight.stored_dtype is not dtype:
        return False
    return weight.is_contiguous() or _is_dense(weight)


def _is_dense(weight: Tensor) -> bool:
    return torch.empty_like(weight, device="meta").stride() == weight.stride()


def _compact(tensor: Tensor) -> Tensor:
    """A weight laid out as a cast would lay it out."""
    if not isinstance(tensor, StoredWeight) or tensor.is_contiguous() or _is_dense(tensor):
        return tensor
    return tensor.data.clone(memory_format=torch.preserve_format)


_REMEMBERED: Final[dict[Any, bool]] = {}
"""The kinds of calls that take 16-bit weights, and whether they return views of these."""


def _call(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], weights: list[StoredWeight]
) -> Any:
    """Calls a function of which it is not known whether it casts the weights."""
    if _torch.is_functorch_active():
        raise ConversionError(
            f"{describe(func)} uses {weights[0].weight_name!r} in a transform of torch.func, which takes operations "
            "apart before autocast sees them, and needs the float32 weights. Transform the float32 model in a region."
        )
    key = _kind(func, args, kwargs, weights[0].device_type)
    is_view = None if key is None else _REMEMBERED.get(key)
    if is_view is not None:
        return _seen(func, args, kwargs, weights, is_view)
    return _see(func, args, kwargs, weights, key)


def _see(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    weights: list[StoredWeight],
    key: Any,
) -> Any:
    """Calls a function with float32 numbers, and sees that it uses nothing of these that is lost."""
    with torch.inference_mode(False), torch.no_grad():
        upcast = {id(w): w.data.to(torch.float32) for w in weights}

    def up(tensor: Tensor) -> Tensor:
        return upcast.get(id(tensor), tensor)

    given = map_tensors(args, up), map_tensors(kwargs, up)
    result, uses, is_view = watched(func, *given, list(upcast.values()))
    for weight in weights:
        found = uses.get(address(upcast[id(weight)]))
        if found is not None and found.dtypes - {weight.stored_dtype}:
            _refuse(
                weight, func, f"casts it to {min(map(str, found.dtypes - {weight.stored_dtype}))}"
            )
        if found is not None and found.computed:
            _refuse(weight, func, f"computes with it in float32 ({found.computed[0]})")
    if any(found.refused for found in uses.values()):
        return result
    if key is not None:
        if len(_REMEMBERED) >= _MOST_CALLS:
            _REMEMBERED.clear()
        _REMEMBERED[key] = is_view
    return _seen(func, args, kwargs, weights, is_view)


def _seen(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    weights: list[StoredWeight],
    is_view: bool,
) -> Any:
    """Calls a function that takes 16-bit weights."""
    if is_view:
        return _views(func(*args, **kwargs), weights)
    return func(*map_tensors(args, _compact), **map_tensors(kwargs, _compact))


def _refuse(weight: StoredWeight, func: Any, what: str) -> NoReturn:
    raise ConversionError(
        f"the converted model stores {weight.weight_name!r} in {weight.stored_dtype}, and {describe(func)} {what}, on "
        "a path that the examples given to convert did not take. A rounded weight would change the result. Convert "
        "the model again, with an example that takes this path: convert(model, ..., example=[one, another])."
    )


def _views(result: Any, weights: list[StoredWeight]) -> Any:
    by_address = {address(weight): weight for weight in weights}

    def view(tensor: Tensor) -> Tensor:
        if isinstance(tensor, StoredWeight):
            return tensor
        owner = by_address.get(address(tensor))
        return tensor if owner is None else owner.as_stored(tensor)

    return map_tensors(result, view)


def _kind(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device_type: str) -> Any:
    """What a call's use of weights depends on, all but the numbers; None where that cannot be compared."""
    state = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    try:
        key = (func, _torch_policy(device_type), state, tuple(_parts((args, kwargs))))
        hash(key)
    except TypeError:
        return None
    return key


def _torch_policy(device_type: str) -> Any:
    bound = thread_state(device_type).state.bound_policy
    return None if bound is None else bound.meaning


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, Tensor):
        stored = getattr(value, "stored_dtype", None)
        yield tuple(value.shape), value.stride(), stored or value.dtype, value.device, bool(stored)
    elif isinstance(value, dict):
        yield "{"
        for name, item in value.items():
            yield name
            yield from _parts(item)
        yield "}"
    elif isinstance(value, list | tuple):
        yield "("
        for item in value:
            yield from _parts(item)
        yield ")"
    else:
        yield type(value), value
