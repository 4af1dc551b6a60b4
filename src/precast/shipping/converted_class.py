"""The class of a converted model: a subclass of the model's own class with calls that run under the policy.

Invariants:

- the class has the name of the model's own class and is a subclass of it, so checks in libraries hold for both;
- a call runs in a region of the policy, whatever region surrounds it; a different surrounding region gives one warning;
- calls in training mode raise an error, because the weights are for inference.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, is_autocast_enabled, is_grad_enabled, nn
from torch.compiler import is_dynamo_compiling

from precast import _torch
from precast._internal import cures
from precast._internal.display import dtype_name
from precast._internal.pytree import map_tensors, tensors_in
from precast.autocast_mode.decorator import region_for_trace
from precast.autocast_mode.region import autocast
from precast.engine.thread_state import thread_state
from precast.errors import ConversionError, PrecastWarning
from precast.shipping.conversion import Conversion
from precast.shipping.stored_weights import inside

__all__ = ["ConvertedState", "converted_class", "is_converted", "set_converted", "state_of"]

_KEY = "_precast_carried"


@dataclass(eq=False)
class ConvertedState:
    """The policy and the report of a converted model.

    Attributes:
        region: the region that its calls run in.
        report: the report on its weights.
        methods: the names of other methods that run in the region.
        is_warned: True after a warning about a surrounding region.
    """

    region: autocast
    report: Conversion
    methods: tuple[str, ...]
    is_warned: bool = False

    @functools.cached_property
    def device(self) -> str:
        """The device type of the region."""
        return self.region.device

    def check(self, model: nn.Module) -> None:
        """Raise an error in training mode, and warn about a different surrounding region."""
        if model.training:
            raise ConversionError(
                f"this {type(model).__name__} was converted for inference, and is in training mode. "
                f"{cures.CONVERT_INFERENCE.text}"
            )
        bound = thread_state(self.device).state.bound_policy
        dtype, policy = torch.get_autocast_dtype(self.device), self.region.policy
        is_other = bool(bound and policy and bound.policy.fingerprint != policy.fingerprint)
        if dtype is self.region.fast_dtype and not is_other:
            return
        self.is_warned = True
        name = f" and the policy {bound.policy.name!r}" if bound and is_other else ""
        warnings.warn(
            f"the surrounding region has {dtype}{name}, but the converted {self.report.model} keeps "
            f"{self.region.fast_dtype} and the policy {self.report.policy!r} of its conversion. Convert the float32 "
            "model again for the other.",
            PrecastWarning,
            stacklevel=3,
        )


def is_converted(model: nn.Module) -> bool:
    """Return True for a model that was converted."""
    return _KEY in vars(model)


def state_of(model: nn.Module) -> ConvertedState:
    """Return the state of a converted model."""
    state: ConvertedState = vars(model)[_KEY]
    return state


@functools.cache
def converted_class(base: type[nn.Module], methods: tuple[str, ...]) -> type[nn.Module]:
    """Return the class of converted models of a class; the same one each time."""
    in_region = {
        name: _in_region(getattr(base, name)) for name in ("forward", "__call__", *methods)
    }

    def body(namespace: dict[str, Any]) -> None:
        namespace.update(
            in_region,
            __module__=base.__module__,
            __qualname__=base.__qualname__,
            __doc__=base.__doc__,
            __reduce_ex__=_reduce_ex(base, methods),
            __repr__=_repr(base),
            __prepare_scriptable__=_not_scripted,
        )

    return types.new_class(base.__name__, (base,), exec_body=body)


def set_converted(model: nn.Module, state: ConvertedState) -> None:
    """Make the calls of a model run under the policy."""
    vars(model)[_KEY] = state
    model.__class__ = converted_class(type(model), state.methods)  # type: ignore[arg-type]


def _repr(base: type[nn.Module]) -> Callable[[nn.Module], str]:
    def text(model: nn.Module) -> str:
        """Return the base's text, with the stored dtypes in each module with weights."""
        modules = [m for m in model.modules() if "extra_repr" not in vars(m)]
        for module in modules:
            vars(module)["extra_repr"] = functools.partial(_with_dtypes, module)
        try:
            return base.__repr__(model)
        finally:
            for module in modules:
                vars(module).pop("extra_repr", None)

    return text


def _with_dtypes(module: nn.Module) -> str:
    """Return the extra text of a module with the dtypes of its own weights: "bias=True, stored in bfloat16"."""
    by_dtype: dict[str, list[str]] = {}
    named = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    for name, tensor in named:
        if tensor.is_floating_point():
            dtype = dtype_name(getattr(tensor, "stored_dtype", tensor.dtype))
            by_dtype.setdefault(dtype, []).append(name)
    each = [f"{' and '.join(names)} in {dtype}" for dtype, names in by_dtype.items()]
    stored = f"stored: {', '.join(each)}" if each else ""
    if len(each) == 1:
        stored = f"stored in {next(iter(by_dtype))}"
    return ", ".join(filter(None, (type(module).extra_repr(module), stored)))


def _not_scripted(model: nn.Module) -> nn.Module:
    """Refuse `torch.jit.script`, which calls this before it compiles a module."""
    raise ConversionError(
        f"a converted {state_of(model).report.model} cannot be compiled by torch.jit.script, which ignores regions. "
        f"{cures.CONVERT_TRACE.text}"
    )


def _in_region(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state: ConvertedState = self.__dict__[_KEY]
        if is_dynamo_compiling():
            with region_for_trace(state.region):
                return _without_graph(method(self, *args, **kwargs), args, kwargs)
        models = inside.models
        if models and models[-1] is self:
            return method(self, *args, **kwargs)
        if self.training or (not state.is_warned and is_autocast_enabled(state.device)):
            state.check(self)
        models.append(self)
        try:
            with state.region:
                return _without_graph(method(self, *args, **kwargs), args, kwargs)
        finally:
            models.pop()

    return run


def _without_graph(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a result without the graph of the weights, unless an argument requires a gradient.

    The graph is recorded as in the original model, because PyTorch chooses kernels by it.
    """
    if (
        not is_grad_enabled()
        or _torch.is_tracing()
        or any(t.requires_grad for t in tensors_in((args, kwargs)))
    ):
        return result
    return map_tensors(result, _detached)


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.requires_grad else tensor


def _reduce_ex(base: type[nn.Module], methods: tuple[str, ...]) -> Callable[..., Any]:
    def reduce_ex(self: nn.Module, protocol: Any) -> Any:
        _, _, *rest = cast(tuple[Any, ...], base.__reduce_ex__(self, max(2, int(protocol))))
        return _new, (base, methods), *rest

    return reduce_ex


def _new(base: type[nn.Module], methods: tuple[str, ...]) -> nn.Module:
    cls = converted_class(base, methods)  # type: ignore[arg-type]
    return cls.__new__(cls)
