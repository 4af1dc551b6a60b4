"""custom_fwd and custom_bwd: custom autograd functions whose backward runs in forward's precision.

Invariants:
- the state of forward (enabled, dtype, cache, policy) is captured in each call and stored on `ctx`; backward restores
  exactly that state, in any thread;
- both styles of `Function` are supported: `forward(ctx, ...)`, and `forward(...)` with `setup_context`;
- arguments are cast in any nesting of containers, and containers keep their types.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar, overload

import torch

from precast._internal.pytree import map_tensors
from precast.autocast_mode.arguments import REQUIRED
from precast.autocast_mode.region import autocast, current_precision, precision_in_graph
from precast.engine.operation import is_eligible
from precast.errors import RegionError, RegionTypeError

__all__ = ["custom_bwd", "custom_fwd"]

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


@overload
def custom_fwd(
    fwd: None = None, *, device_type: str = REQUIRED, cast_inputs: torch.dtype | None = None
) -> Callable[[F], F]: ...
@overload
def custom_fwd(
    fwd: F, *, device_type: str = REQUIRED, cast_inputs: torch.dtype | None = None
) -> F: ...
def custom_fwd(
    fwd: Any = None, *, device_type: str = REQUIRED, cast_inputs: torch.dtype | None = None
) -> Any:
    """Decorate `forward` of a `torch.autograd.Function`, as `torch.amp.custom_fwd`.

    Place it below ``@staticmethod`` in the class body: a `setup_context` of the same class is then wrapped too, and
    gets the same inputs as `forward`. The `setup_context` of an operator (`torch.library.register_autograd`) is
    decorated itself, without `cast_inputs`.

    Args:
        fwd: The function, if the decorator is used without parentheses.
        device_type: The device type of the tensors, such as ``"cuda"``. Required.
        cast_inputs: If given and autocast is on, the floating-point tensors of that device type in the arguments are
            cast to it (float64 stays), and `forward` runs with autocast off. If None, `forward` runs unchanged.

    Raises:
        RegionError: `device_type` is missing, or not the name of a device type with autocast.

    Examples:
        >>> class Multiply(torch.autograd.Function):
        ...     @staticmethod
        ...     @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        ...     def forward(ctx, a, b):
        ...         ctx.save_for_backward(a, b)
        ...         return a @ b
        ...     @staticmethod
        ...     @custom_bwd(device_type="cpu")
        ...     def backward(ctx, gradient):
        ...         a, b = ctx.saved_tensors
        ...         return gradient @ b.T, a.T @ gradient
        >>> with autocast("cpu"):
        ...     Multiply.apply(torch.ones(2, 2), torch.ones(2, 2).bfloat16()).dtype
        torch.float32
    """
    _require_device_type("custom_fwd", device_type)
    if fwd is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)
    wrapper = _SetupContextWrapper(device_type, cast_inputs)
    _class_body(inspect.currentframe())[f"_precast_custom_fwd_{device_type}"] = wrapper
    return _forward(fwd, device_type, cast_inputs)


@overload
def custom_bwd(bwd: None = None, *, device_type: str = REQUIRED) -> Callable[[F], F]: ...
@overload
def custom_bwd(bwd: F, *, device_type: str = REQUIRED) -> F: ...
def custom_bwd(bwd: Any = None, *, device_type: str = REQUIRED) -> Any:
    """Decorate `backward` of a `torch.autograd.Function`: it runs in the region of its forward.

    Args:
        bwd: The function, if the decorator is used without parentheses.
        device_type: The same as in `custom_fwd`. Required.

    Raises:
        RegionError: `device_type` is missing or unknown; or, in backward, `forward` is not decorated for this device
            type.
    """
    _require_device_type("custom_bwd", device_type)
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)

    @functools.wraps(bwd)
    def decorated(ctx: Any, *gradients: Any, **kwargs: Any) -> Any:
        with _recall(ctx, device_type):
            return bwd(ctx, *gradients, **kwargs)

    return decorated


# Functions with plain values in their closures, because Dynamo traces no objects of precast's there.


def _forward(function: Callable[..., Any], device_type: str, dtype: torch.dtype | None) -> Any:
    @functools.wraps(function)
    def decorated(*args: Any, **kwargs: Any) -> Any:
        if not _casts(device_type, dtype):
            return _run_recording(function, device_type, *args, **kwargs)
        with torch.autocast(device_type, enabled=False):
            # Without ctx, which Dynamo cannot inspect (until 2.12).
            cast = [a if _is_context(a) else _cast(a, device_type, dtype) for a in args]
            return _run_recording(function, device_type, *cast, **_cast(kwargs, device_type, dtype))

    return decorated


def _setup_context(function: Callable[..., Any], device_type: str, dtype: Any) -> Any:
    @functools.wraps(function)
    def decorated(ctx: Any, inputs: tuple[Any, ...], output: Any) -> Any:
        if not _casts(device_type, dtype):
            return _run_recording(function, device_type, ctx, inputs, output)
        # Cast again, not stored by forward: it may call itself in between.
        with torch.autocast(device_type, enabled=False):
            return _run_recording(
                function, device_type, ctx, _cast(inputs, device_type, dtype), output
            )

    return decorated


def _run_recording(
    function: Callable[..., Any], device_type: str, /, *args: Any, **kwargs: Any
) -> Any:
    """Call `function`, and record the precision in force on its `ctx`, if it has one."""
    ctx = args[0] if args else kwargs.get("ctx")  # operators call setup_context with keywords
    if _is_context(ctx):
        setattr(ctx, _slot(device_type), _capture(device_type))
    return function(*args, **kwargs)


def _is_context(value: Any) -> bool:
    return hasattr(value, "save_for_backward")


def _casts(device_type: str, dtype: torch.dtype | None) -> bool:
    return dtype is not None and torch.is_autocast_enabled(device_type)


def _cast(value: T, device_type: str, dtype: torch.dtype | None) -> T:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if is_eligible(tensor, device_type) else tensor

    return map_tensors(value, cast)


class _SetupContextWrapper:
    """A temporary attribute of a class body that wraps the class's `setup_context` when the class is created.

    There is no other way to reach it: in that style `forward` gets no `ctx`, and a decorated function does not know its
    class.
    """

    def __init__(self, device_type: str, dtype: torch.dtype | None) -> None:
        self.device_type = device_type
        self.dtype = dtype

    def __set_name__(self, owner: type, name: str) -> None:
        delattr(owner, name)
        setup = getattr(owner, "setup_context", torch.autograd.Function.setup_context)
        if setup is not torch.autograd.Function.setup_context:
            wrapped = _setup_context(setup, self.device_type, self.dtype)
            owner.setup_context = staticmethod(wrapped)  # type: ignore[attr-defined]


def _class_body(decorator: FrameType | None) -> dict[str, Any]:
    """Return the namespace of the class body that calls the decorator, or an unused dict."""
    namespace = decorator.f_back.f_locals if decorator and decorator.f_back else {}
    return namespace if "__qualname__" in namespace and "__module__" in namespace else {}


def _slot(device_type: str) -> str:
    return f"_precast_{device_type}_region"


def _capture(device_type: str) -> Any:
    """Return the region for backward: the precision in force here."""
    return (
        precision_in_graph(device_type)
        if torch.compiler.is_dynamo_compiling()
        else current_precision(device_type)
    )


def _recall(ctx: Any, device_type: str) -> Any:
    captured = getattr(ctx, _slot(device_type), None)
    if captured is None:
        raise RegionError(
            f"{type(ctx).__name__} is decorated with custom_bwd(device_type={device_type!r}), but "
            "its forward left no autocast state. Decorate forward in the class body with "
            f"@custom_fwd(device_type={device_type!r}), below @staticmethod."
        )
    return torch.autocast(*captured) if isinstance(captured, tuple) else captured


def _require_device_type(name: str, device_type: Any) -> None:
    if device_type is REQUIRED or not isinstance(device_type, str):
        passed = "none" if device_type is REQUIRED else repr(device_type)
        raise RegionTypeError(
            f"{name} needs a device type as text; got {passed}. Write @{name}(device_type='cuda'), "
            f"which is what torch.cuda.amp.{name} meant, or 'cpu' for tensors on the CPU."
        )
    autocast(device_type, enabled=False)  # raises an error for names without autocast
