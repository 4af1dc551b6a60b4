"""Weights that are stored in 16 bits, and check that this rounding changes no result.

Invariants:

- in a region such a weight behaves like its float32 original: casts of it give the same bits, its dtype is float32, and
  a computation that needs its float32 values raises an error that names it, because these values are gone;
- outside of all regions it is a 16-bit parameter like any other;
- copies, pickles and views behave like it; a state dict has plain tensors.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, is_autocast_enabled, is_grad_enabled, is_inference_mode_enabled, nn
from torch.compiler import is_dynamo_compiling

from precast import _torch
from precast._internal import cures
from precast._internal.pytree import map_tensors, tensors_in
from precast.attachment.weight_casts import METADATA
from precast.engine.thread_state import ThreadLocalState, thread_state
from precast.errors import ConversionError
from precast.shipping.function_calls import (
    WeightUses,
    address,
    casts_by_rule,
    describe,
    lowers,
    makes_parameter,
    observed_call,
    region_dtype,
)
from precast.weights.view_cache import is_dense

__all__ = ["StoredBuffer", "StoredParameter", "StoredWeight", "inside", "stored_buffer"]


class RunningModels(threading.local):
    """The converted models that run in this thread, the innermost last."""

    def __init__(self) -> None:
        self.models: list[nn.Module] = []


inside: Final = RunningModels()


class StoredWeight(Tensor):
    """The base class of stored parameters and buffers.

    Attributes:
        weight_name: the name in the model.
        stored_dtype: the dtype of its values; `dtype` differs in a region.
        device_type: the device type that it was converted for.
        thread: the state of the current thread for that device type.
        is_dense: True if its memory layout is that of a cast's result; False if unknown.
        trains: True if it requires a gradient, as in the original model. PyTorch chooses kernels of products by it.
        plain: the same values in the same memory as a tensor of PyTorch's own class, which functions take without
            checks; replaced when the weight gets other memory.
        as_cast: `plain`, or the same with a gradient if the weight requires one: a region's cast without gradients.
    """

    is_dense: bool = False
    trains: bool = False
    plain: Tensor
    as_cast: Tensor
    weight_name: str
    stored_dtype: torch.dtype
    device_type: str
    thread: ThreadLocalState

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The dtype of the values; in a region float32, as in the original model."""
        if inside.models or is_autocast_enabled(self.device_type):
            return torch.float32
        return self.stored_dtype

    def as_subclass(self, cls: type[Any]) -> Any:
        """Return a view of a class as `Tensor.as_subclass` does, which does not call `__torch_function__` (2.13)."""
        return _dispatch(Tensor.as_subclass, (self, cls), {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            values = _plain(self).clone(memory_format=torch.preserve_format)
            memo[id(self)] = self._with(values)
        return memo[id(self)]

    def _with(self, values: Tensor) -> StoredWeight:
        return stored_buffer(values, self.weight_name, self.device_type)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with _torch.without_subclass_functions():
            if is_dynamo_compiling():
                return func(*args, **(kwargs or {}))
            if func in _GIVE_OTHER_MEMORY:
                return _with_other_memory(func, args, kwargs or {})
            if not kwargs and _is_common(func, args):
                if is_inference_mode_enabled():
                    args = tuple(v.plain if type(v) is StoredParameter else v for v in args)
                return func(*args)
            kwargs = kwargs or {}
            weights = [] if func in METADATA else _stored_in(args, kwargs)
            device = weights[0].device_type if weights else ""
            if not weights or not (inside.models or is_autocast_enabled(device)):
                return func(*args, **kwargs)
            dtype = region_dtype(device)
            if casts_by_rule(func, args, kwargs, device) and all(
                weight.stored_dtype is dtype for weight in weights
            ):
                return func(*map_tensors(args, _cast), **map_tensors(kwargs, _cast))
            return _call(func, args, kwargs, weights)


def _is_common(func: Any, args: tuple[Any, ...]) -> bool:
    """Return True for the most common kind of call: tensors and whole parameters, which the region casts.

    It replaces all other checks, and takes 2 us.
    """
    device = None
    for value in args:
        kind = type(value)
        if kind is StoredParameter:
            if device is None:
                device = value.device_type
                if not is_autocast_enabled(device):
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
    [Tensor.data.__set__, Tensor.requires_grad.__set__]  # type: ignore[attr-defined]
    + [getattr(Tensor, name) for name in ("resize_", "resize_as_", "as_strided_", "t_")]
    + [getattr(Tensor, name) for name in ("transpose_", "swapaxes_", "swapdims_")]
    + [getattr(Tensor, name) for name in ("squeeze_", "unsqueeze_", "requires_grad_")]
)
"""Functions that change a tensor's memory, its layout, or whether it requires a gradient."""


def _with_other_memory(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = func(*args, **kwargs)
    if isinstance(args[0], StoredParameter):
        args[0].update()
    return result


class StoredParameter(StoredWeight, nn.Parameter):
    """A parameter that is stored in 16 bits."""

    def __new__(  # noqa: D102
        cls, data: Tensor, name: str, device_type: str, trains: bool = False
    ) -> StoredParameter:
        _torch.on_undispatched_call(_dispatch)
        parameter: StoredParameter = nn.Parameter.__new__(cls, data, trains)
        _described(parameter, name, data.dtype, device_type).update()
        return parameter

    def update(self) -> None:
        """Record the memory of the parameter, its layout, and whether it requires a gradient."""
        with _torch.without_subclass_functions():
            self.plain = self.as_cast = self.data
            self.is_dense, self.trains = is_dense(self.plain), self.requires_grad
            if self.trains:
                self.as_cast = self.data.requires_grad_()

    def detach(self) -> Tensor:
        """Detach as `Tensor.detach` does; `nn.Parameter(weight)` gets a weight of the same class, which it needs."""
        frame = None if is_dynamo_compiling() else inspect.currentframe()
        if makes_parameter(frame):
            return self._with(_plain(self))
        return super().detach()

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Set the memory as `Tensor.set_` does, which alone does not call `__torch_function__` (2.13)."""
        return _with_other_memory(Tensor.set_, (self, *args), kwargs)

    def _with(self, values: Tensor) -> StoredParameter:
        return StoredParameter(values, self.weight_name, self.device_type, self.trains)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return StoredParameter, (_plain(self), self.weight_name, self.device_type, self.trains)


class StoredBuffer(StoredWeight):
    """A buffer that is stored in 16 bits."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return stored_buffer, (_plain(self), self.weight_name, self.device_type)


class StoredView(StoredWeight):
    """A view of a stored weight, such as in a state dict made in a region; it is saved as a plain tensor."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)


def stored_buffer(data: Tensor, name: str, device_type: str) -> StoredBuffer:
    """Return a buffer with these 16-bit values."""
    _torch.on_undispatched_call(_dispatch)
    buffer: StoredBuffer = data.as_subclass(StoredBuffer)
    return _described(buffer, name, data.dtype, device_type)  # type: ignore[no-any-return]


def _described(weight: Any, name: str, dtype: torch.dtype, device_type: str) -> Any:
    weight.weight_name, weight.stored_dtype, weight.device_type = name, dtype, device_type
    weight.thread = thread_state(device_type)
    return weight


def _dispatch(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function as PyTorch calls those that ask the class of their arguments."""
    if _stored_in(args, kwargs):
        return StoredWeight.__torch_function__(function, (), args, kwargs)
    return function(*args, **kwargs)


def _plain(weight: Tensor) -> Tensor:
    """Return the stored values as a tensor of PyTorch's own class, in a region too."""
    with _torch.without_subclass_functions():
        return weight.data


def _stored_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[StoredWeight]:
    has_nested = kwargs or any(isinstance(value, list | tuple | dict) for value in args)
    values = tensors_in((args, kwargs)) if has_nested else args
    return [value for value in values if isinstance(value, StoredWeight)]


def _cast(tensor: Tensor) -> Tensor:
    """Return a weight with the memory layout of a region's cast, and with a gradient where that cast requires one."""
    if not isinstance(tensor, StoredWeight):
        return tensor
    cast = tensor if is_dense(tensor) else tensor.clone(memory_format=torch.preserve_format)
    if is_grad_enabled() or not tensor.requires_grad:
        return cast
    # Without gradients, a region keeps the casts of whole weights, and these require one (2.13).
    is_kept = isinstance(tensor, StoredParameter) and not is_inference_mode_enabled()
    return cast.detach().requires_grad_(is_kept)


_MOST_CALLS: Final = 4096
_REMEMBERED: Final[dict[Any, bool]] = {}
"""The kinds of calls that accept 16-bit weights; True if they return views of these."""
_READ_VALUES: Final[frozenset[Any]] = frozenset(
    getattr(Tensor, name) for name in ("tolist", "numpy", "__array__", "__dlpack__")
)
"""Functions that read the values of a tensor without an operation."""


def _call(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], weights: list[StoredWeight]
) -> Any:
    """Call a function that may use the float32 values of the weights, or raise an error if it does."""
    if _torch.is_functorch_active():
        raise ConversionError(
            f"{describe(func)} uses {weights[0].weight_name!r} in a transform of torch.func, which decomposes "
            "operations before autocast, and needs the float32 weights. "
            f"{cures.CONVERT_FUNC.text}"
        )
    if func in _READ_VALUES:
        _refuse(weights[0], func, "reads its float32 values")
    key = _kind(func, args, kwargs, weights[0].device_type)
    is_view = None if key is None else _REMEMBERED.get(key)
    if is_view is None:
        with torch.inference_mode(False), torch.no_grad():
            upcast = {id(w): w.data.to(torch.float32) for w in weights}

        def up(tensor: Tensor) -> Tensor:
            return upcast.get(id(tensor), tensor)

        wide = map_tensors(args, up), map_tensors(kwargs, up)
        result, uses, is_view = observed_call(func, *wide, list(upcast.values()))
        for weight in weights:
            _check_uses(weight, func, uses.get(address(upcast[id(weight)])))
        if any(use.refused for use in uses.values()):
            return result
        if is_view:
            stored = _views(func(*args, **kwargs), weights)
            other = {view.dtype for view in tensors_in(result)} - {torch.float32}
            if other:
                _refuse(weights[0], func, f"reads it as {other.pop()}")
            if not all(isinstance(own, StoredWeight) for own in tensors_in(stored)):
                # A conversion to float32 returns a float32 weight itself.
                if result is upcast[id(weights[0])] and stored.dtype is torch.float32:
                    return weights[0]
                _refuse(weights[0], func, "copies its float32 values")
        if key is not None:
            if len(_REMEMBERED) >= _MOST_CALLS:
                _REMEMBERED.clear()
            _REMEMBERED[key] = is_view
    if is_view:
        return _views(func(*args, **kwargs), weights)
    result = func(*map_tensors(args, _cast), **map_tensors(kwargs, _cast))
    return map_tensors(result, _cast_copy)


def _check_uses(weight: StoredWeight, func: Any, uses: WeightUses | None) -> None:
    other = uses.dtypes - {weight.stored_dtype} if uses is not None else ()
    if other:
        _refuse(weight, func, f"casts it to {min(map(str, other))}")
    if uses is not None and uses.computed:
        _refuse(weight, func, f"computes with it in float32 ({uses.computed[0]})")


def _cast_copy(tensor: Tensor) -> Tensor:
    """Return a plain copy of a weight that a cast to its stored dtype returned: for a float32 weight it is new."""
    return _plain(tensor).clone() if isinstance(tensor, StoredWeight) else tensor


def _refuse(weight: StoredWeight, func: Any, problem: str) -> NoReturn:
    raise ConversionError(
        f"the converted model stores {weight.weight_name!r} in {weight.stored_dtype}, and {describe(func)} {problem}, "
        "on a path that the examples of convert did not take. A rounded weight would change the result. "
        f"{cures.CONVERT_PATH.text}"
    )


def _views(result: Any, weights: list[StoredWeight]) -> Any:
    by_address = {address(weight): weight for weight in weights}

    def view(tensor: Tensor) -> Tensor:
        owner = None if isinstance(tensor, StoredWeight) else by_address.get(address(tensor))
        if owner is None:
            return tensor
        stored = tensor.as_subclass(StoredView)
        return _described(stored, owner.weight_name, tensor.dtype, owner.device_type)  # type: ignore[no-any-return]

    return map_tensors(result, view)


def _kind(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device_type: str) -> Any:
    """Return a key for everything that a call's use of weights depends on; None if it cannot be hashed."""
    bound = thread_state(device_type).state.bound_policy
    policy = None if bound is None else bound.distinct_fingerprint
    key = (func, policy, region_dtype(device_type), tuple(_parts((args, kwargs))))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, Tensor):
        stored = getattr(value, "stored_dtype", None)
        yield tuple(value.shape), value.stride(), stored or value.dtype, value.device, bool(stored)
    elif isinstance(value, dict | list | tuple):
        yield type(value), len(value)
        for item in value.items() if isinstance(value, dict) else value:
            yield from _parts(item)
    else:
        yield type(value), value
