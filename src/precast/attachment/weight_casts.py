"""Float32 casts of 16-bit weights, for modules whose rule requires another dtype than that of the weights.

A module with the rule `fp32` takes float32 inputs. Its weights may be stored in bfloat16, and most operations refuse
such a mixture. While the module runs, a function mode replaces its 16-bit parameters and buffers by float32 casts in
every call of a PyTorch function, so the module computes what `module.float()` would.

Invariants:

- a weight is cast once in each call of the module, and the cast is part of the autograd graph: the gradient of the
  weight has the weight's dtype;
- the module itself does not change, so other threads, state dicts and optimizers see the stored weights;
- values that the module writes to a cast, such as running statistics, are written to the weight when the call ends;
- the rule of the innermost module with a rule for a dtype applies. Weights in the 16-bit dtype of its region are not
  cast.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from precast import _torch
from precast._internal.pytree import map_tensors
from precast.errors import PolicyError

__all__ = [
    "METADATA",
    "UncastDtypes",
    "WeightCasts",
    "add_note",
    "current",
    "in_trace",
    "is_traced",
    "low_weights",
    "put",
    "using",
]

UncastDtypes = Mapping[str, torch.dtype | None]
"""Maps a device type to the 16-bit dtype whose weights are not cast; to None if both are cast."""

_GETTERS: Final = (
    *("shape", "device", "requires_grad", "layout", "ndim", "is_leaf", "names", "grad", "grad_fn"),
    *("is_cpu", "is_cuda", "is_meta", "is_mps", "is_mtia", "is_xpu", "is_sparse", "is_nested"),
    *("is_quantized", "is_mkldnn", "is_sparse_csr", "_version", "_backward_hooks", "retains_grad"),
)
_METHODS: Final = (
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "get_device"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_inference", "is_pinned", "is_shared"),
    *("is_signed", "has_names", "__len__", "__hash__", "__repr__", "__format__", "__dir__"),
    *("untyped_storage", "is_same_size", "register_hook", "is_conj", "is_neg"),
)
METADATA: Final[frozenset[Any]] = frozenset(
    [getattr(Tensor, name).__get__ for name in _GETTERS if hasattr(Tensor, name)]
    + [getattr(Tensor, name) for name in _METHODS if hasattr(Tensor, name)]
    + [torch.numel, torch.is_floating_point, torch.is_complex]
)
"""Functions whose result does not depend on a tensor's elements or dtype."""
_ON_WEIGHT_ITSELF: Final = METADATA | {
    getattr(Tensor, name)
    for name in (
        *("requires_grad_", "retain_grad", "register_post_accumulate_grad_hook", "backward"),
        *("__deepcopy__", "__reduce_ex__", "share_memory_", "set_", "data_ptr"),
    )
}
"""Functions that get the weight itself, not its cast, because they concern its metadata, hooks or memory."""
_DTYPE: Final = Tensor.dtype.__get__  # type: ignore[attr-defined]
_DATA: Final = Tensor.data.__get__  # type: ignore[attr-defined]
_DTYPE_ERROR_WORDS: Final = ("dtype", "scalar type", "BFloat16", "Half")
_NOT_IN_PLACE: Final = frozenset({"__index__", "__int__", "__invert__"})


class WeightCasts:
    """The float32 casts of a module's weights during one call of it.

    Args:
        uncast: the 16-bit dtype that needs no cast, by device type.
        registered: the module's parameters and buffers that need a cast.
    """

    def __init__(self, uncast: UncastDtypes, registered: Iterable[Tensor]) -> None:
        self.uncast = uncast
        self._registered = {id(tensor): tensor for tensor in registered}
        self._casts: dict[int, _WeightCast] = {}
        self.has_buffers = not all(isinstance(t, nn.Parameter) for t in self._registered.values())

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a PyTorch function with casts instead of the weights."""
        if func in _ON_WEIGHT_ITSELF or func.__name__ == "__set__":
            return func(*args, **kwargs)
        if func == _DTYPE:
            return torch.float32 if self._is_cast(args[0]) else func(*args)
        cast_args, cast_kwargs = map_tensors(args, self.of), map_tensors(kwargs, self.of)
        if func == _DATA and cast_args is not args:
            self._casts[id(args[0])].is_exposed = True
        result = func(*cast_args, **cast_kwargs)
        # `self.mean *= 0.9` and `self.u = normalize(v, out=self.u)` assign the result to the attribute of the buffer.
        if result is cast_kwargs.get("out"):
            return kwargs.get("out")
        if args and result is cast_args[0] and _is_in_place(func.__name__):
            return args[0]
        return result

    def of(self, tensor: Tensor) -> Tensor:
        """Return the float32 cast of a weight that needs one, and any other tensor unchanged."""
        if not self._is_cast(tensor):
            return tensor
        needs_graph = tensor.requires_grad and torch.is_grad_enabled()
        if _torch.is_functorch_active():  # a cast belongs to the transform in which it was created
            return tensor.to(torch.float32)
        cast = self._casts.get(id(tensor))
        if cast is None or (needs_graph and not cast.tensor.requires_grad):
            if cast is not None:
                cast.write_back()
            cast = self._casts[id(tensor)] = _WeightCast(tensor)
        return cast.tensor

    def without_casts(self) -> WeightCasts:
        """Return a copy without casts, for code that runs again."""
        return WeightCasts(self.uncast, self._registered.values())

    def write_back(self) -> None:
        """Write to the weights what the call has written to their casts."""
        for cast in self._casts.values():
            cast.write_back()

    def _is_cast(self, tensor: Tensor) -> bool:
        return _is_cast(tensor, self.uncast) and (
            isinstance(tensor, nn.Parameter) or id(tensor) in self._registered
        )


class _WeightCast:
    """The float32 cast of one weight."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        if torch.is_inference_mode_enabled():  # a cast that is created there has no version counter
            with torch.inference_mode(False), torch.no_grad():
                self.tensor = weight.to(torch.float32)
        else:
            self.tensor = weight.to(torch.float32)
        # Kernels of batch norms do not increment the version counters of running statistics (2.13).
        self.is_exposed = not isinstance(weight, nn.Parameter)
        """True if the cast may have been written without incrementing its version counter."""
        self._version = _torch.version_of(self.tensor)
        self._node = self.tensor.grad_fn

    def write_back(self) -> None:
        """Write the cast's values to the weight, if they have changed."""
        if _torch.version_of(self.tensor) == self._version and not self._has_other_values():
            return
        # If autograd recorded the write, it also has to record the copy, or raise its error for leaves.
        recorded = self.tensor.grad_fn is not self._node
        with torch.set_grad_enabled(recorded and torch.is_grad_enabled()):
            self.weight.copy_(self.tensor)
        self._version, self._node = _torch.version_of(self.tensor), self.tensor.grad_fn

    def _has_other_values(self) -> bool:
        if not self.is_exposed or self.weight.is_inference() > torch.is_inference_mode_enabled():
            return False
        if self.weight.device.type != "cpu":  # a comparison would wait for the device
            return True
        with torch.no_grad():
            return not torch.equal(self.tensor.to(self.weight.dtype), self.weight)


def _is_cast(tensor: Tensor, uncast: UncastDtypes) -> bool:
    """Return True if a weight has a 16-bit dtype that `uncast` does not name."""
    dtype = tensor.dtype
    if dtype not in _torch.SIXTEEN_BIT:
        return False
    device = tensor.device.type
    return device in uncast and uncast[device] is not dtype


def _is_in_place(name: str) -> bool:
    if name.startswith("__"):
        return name.startswith("__i") and name not in _NOT_IN_PLACE
    return name.endswith("_")


def low_weights(module: nn.Module, uncast: UncastDtypes, where: str) -> list[Tensor]:
    """Return the parameters and buffers in a module that need a cast under `uncast`.

    Raises:
        PolicyError: one of them belongs to a scripted module; the message begins with `where`.
    """
    # If an outer module has casts, the function mode would report float32 as the dtype.
    if _thread.casts is not None:
        with _torch.without_torch_function():
            return _low_weights(module, uncast, where)
    return _low_weights(module, uncast, where)


def _low_weights(module: nn.Module, uncast: UncastDtypes, where: str) -> list[Tensor]:
    low: list[Tensor] = []
    modules = [module]
    for each in modules:
        low += [tensor for tensor in _torch.own_tensors(each) if _is_cast(tensor, uncast)]
        if low and isinstance(each, torch.jit.ScriptModule):
            raise PolicyError(
                f"{where}: a {each.original_name} in it is scripted and has weights in {low[-1].dtype}, which "
                "TorchScript would use as they are. Convert it to float32 (module.float()) before or after you script "
                "it, or remove the rule."
            )
        modules += _torch.own_modules(each)
    return low


# --- casts in force ---


class _ThreadCasts(threading.local):
    """The casts in force in this thread."""

    def __init__(self) -> None:
        self.casts: WeightCasts | None = None


_thread: Final = _ThreadCasts()


class _CastMode(TorchFunctionMode):
    """The function mode that calls functions with the casts of the thread. There is one object for all threads."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if torch.compiler.is_dynamo_compiling() and (_traced or not _has_buffers()):
            uncast = _traced[-1] if _traced else _uncast_in_thread()
            return _call_in_trace(uncast, func, args, kwargs or {})
        return _call(func, args, kwargs or {})


@_torch.never_compiled
def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function with this thread's casts. Not compiled: a graph would lose writes to the cast of a buffer."""
    casts = _thread.casts
    return func(*args, **kwargs) if casts is None else casts.call(func, args, kwargs)


_MODE: Final = _CastMode()


def add_note(error: BaseException | None, where: str, uncast: nn.Module | None = None) -> None:
    """Add advice to an error about dtypes, because PyTorch's message names neither the rule nor the module.

    `uncast` is the module, if its rule is for operations and so leaves 16-bit weights as they are stored.
    """
    if not isinstance(error, RuntimeError) or getattr(error, "__notes__", None):
        return
    if not any(word in str(error) for word in _DTYPE_ERROR_WORDS):
        return
    if uncast is not None and not any(
        each.dtype in _torch.SIXTEEN_BIT for each in uncast.parameters()
    ):
        return
    error.add_note(
        f"precast: {where} is a rule for operations: other layers use 16-bit weights as they are stored. Add the rule "
        "fp32 for the layer that failed, or call module.float() before attach."
        if uncast is not None
        else f"precast: {where} casts 16-bit weights to float32 in every function of PyTorch. A function of another "
        "library may have got them as they are stored: call module.float() before attach, or remove the rule."
    )


def current() -> WeightCasts | None:
    """Return the casts of this thread; None if weights are used in their stored dtype."""
    return _thread.casts


def put(casts: WeightCasts | None) -> None:
    """Use these casts in this thread; with None, weights are used in their stored dtype."""
    if casts is _thread.casts:
        return
    _thread.casts = casts
    if casts is None:
        _torch.leave_function_mode(_MODE)
    else:
        _torch.custom_functions.begin()
        _torch.enter_function_mode(_MODE)


def _cast_all(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Cast the weights among the arguments of a custom autograd function."""
    if _thread.casts is None:
        return args
    with _torch.without_torch_function():  # the function mode would report float32 as dtype
        return map_tensors(args, _thread.casts.of)


_torch.custom_function_arguments.append(_cast_all)


@contextmanager
def using(casts: WeightCasts | None) -> Iterator[None]:
    """Open a block in which these casts are used."""
    previous = _thread.casts
    put(casts)
    try:
        yield
    finally:
        put(previous)
        if casts is not None:
            casts.write_back()


# --- in functions that torch.compile traces ---

_traced: Final[list[tuple[tuple[str, torch.dtype | None], ...]]] = []
"""The dtypes that are not cast in the traced modules, as constants; the outermost module first."""


def is_traced() -> bool:
    """Return True while a module is traced whose weights may be cast."""
    return bool(_traced)


def in_trace(uncast: tuple[tuple[str, torch.dtype | None], ...]) -> Generator[None, None, None]:
    """Enable the function mode while a module is traced; the first `next` enables it, the second disables it."""
    _traced.append(uncast)
    with _MODE:
        yield
    _traced.pop()


@_torch.traced_as_constant
def _has_buffers() -> bool:
    return _thread.casts is not None and _thread.casts.has_buffers


@_torch.traced_as_constant
def _uncast_in_thread() -> tuple[tuple[str, torch.dtype | None], ...]:
    return () if _thread.casts is None else tuple(_thread.casts.uncast.items())


def _call_in_trace(
    uncast: tuple[tuple[str, torch.dtype | None], ...],
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    by_device = dict(uncast)

    def cast(value: Any) -> Any:
        if isinstance(value, nn.Parameter) and _is_cast(value, by_device):
            return value.to(torch.float32)
        if type(value) in (list, tuple):
            return type(value)([cast(item) for item in value])
        return value

    return func(*[cast(value) for value in args], **{k: cast(v) for k, v in kwargs.items()})
