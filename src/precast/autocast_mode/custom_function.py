"""custom_fwd and custom_bwd: custom autograd functions whose backward runs in forward's precision.

Invariants:
- what forward ran in (on or off, dtype, cache, policy) is captured once a call and kept on `ctx`;
  backward enters exactly that, whatever the thread that runs it is in;
- both styles of `Function` work: `forward(ctx, ...)`, and `forward(...)` with `setup_context`;
- arguments are cast in any nesting of containers and no container is broken by it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, TypeVar, overload

import torch

from precast._internal.pytree import map_tensors
from precast.autocast_mode.region import autocast, current, in_graph
from precast.engine.operation import is_eligible
from precast.errors import RegionError, RegionTypeError

__all__ = ["custom_bwd", "custom_fwd"]

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
_REQUIRED: Final[Any] = "(required)"


@overload
def custom_fwd(
    fwd: None = None, *, device_type: str = _REQUIRED, cast_inputs: torch.dtype | None = None
) -> Callable[[F], F]: ...
@overload
def custom_fwd(
    fwd: F, *, device_type: str = _REQUIRED, cast_inputs: torch.dtype | None = None
) -> F: ...
def custom_fwd(
    fwd: Any = None, *, device_type: str = _REQUIRED, cast_inputs: torch.dtype | None = None
) -> Any:
    """Decorates `forward` of a `torch.autograd.Function`, as `torch.amp.custom_fwd`.

    Place it below ``@staticmethod``, inside the class body: a `setup_context` of the same class is
    then wrapped too, and sees the same inputs as `forward`. The `setup_context` of an operator
    (`torch.library.register_autograd`) is decorated itself, without `cast_inputs`.

    Args:
        fwd: The function, where the decorator is written without parentheses.
        device_type: The device type of the tensors, such as ``"cuda"``. Required.
        cast_inputs: If given and autocast is on, the floating-point tensors of that device type in
            the arguments are cast to it (float64 stays), and `forward` runs with autocast off.
            If None, `forward` runs as it is called.

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
    later = _WrapsSetupContext(device_type, cast_inputs)
    _class_body(inspect.currentframe())[f"_precast_custom_fwd_{device_type}"] = later
    return _forward(fwd, device_type, cast_inputs)


@overload
def custom_bwd(bwd: None = None, *, device_type: str = _REQUIRED) -> Callable[[F], F]: ...
@overload
def custom_bwd(bwd: F, *, device_type: str = _REQUIRED) -> F: ...
def custom_bwd(bwd: Any = None, *, device_type: str = _REQUIRED) -> Any:
    """Decorates `backward` of a `torch.autograd.Function`: it runs in the region of its forward.

    Args:
        bwd: The function, where the decorator is written without parentheses.
        device_type: As given to `custom_fwd`. Required.

    Raises:
        RegionError: `device_type` is missing or unknown; or, in backward, `forward` was not
            decorated for this device type.
    """
    _require_device_type("custom_bwd", device_type)
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)

    @functools.wraps(bwd)
    def decorated(ctx: Any, *gradients: Any, **kwargs: Any) -> Any:
        with _recall(ctx, device_type):
            return bwd(ctx, *gradients, **kwargs)

    return decorated


# Plain functions with plain values in their closures: Dynamo traces no objects of ours there.


def _forward(function: Callable[..., Any], device_type: str, dtype: torch.dtype | None) -> Any:
    @functools.wraps(function)
    def decorated(*args: Any, **kwargs: Any) -> Any:
        if not _casts(device_type, dtype):
            return _noting(function, device_type, *args, **kwargs)
        with torch.autocast(device_type, enabled=False):
            # Not ctx: Dynamo cannot look into it (until 2.12).
            cast = [a if _is_context(a) else _cast(a, device_type, dtype) for a in args]
            return _noting(function, device_type, *cast, **_cast(kwargs, device_type, dtype))

    return decorated


def _setup_context(function: Callable[..., Any], device_type: str, dtype: Any) -> Any:
    @functools.wraps(function)
    def decorated(ctx: Any, inputs: tuple[Any, ...], output: Any) -> Any:
        if not _casts(device_type, dtype):
            return _noting(function, device_type, ctx, inputs, output)
        # Cast once more rather than kept from forward: it may call itself in between.
        with torch.autocast(device_type, enabled=False):
            return _noting(function, device_type, ctx, _cast(inputs, device_type, dtype), output)

    return decorated


def _noting(function: Callable[..., Any], device_type: str, /, *args: Any, **kwargs: Any) -> Any:
    """Calls `function`, and notes on its `ctx`, if it gets one, what it runs in."""
    ctx = args[0] if args else kwargs.get("ctx")  # operators call setup_context by keywords
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


class _WrapsSetupContext:
    """Sits in a class body until the class is made, and then wraps its `setup_context`.

    The one way to reach it: `forward` of that style never meets `ctx`, and a decorated function
    does not learn what class it belongs to.
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
    """The namespace of the class body that calls the decorator, or one that nobody reads."""
    namespace = decorator.f_back.f_locals if decorator and decorator.f_back else {}
    return namespace if "__qualname__" in namespace and "__module__" in namespace else {}


def _slot(device_type: str) -> str:
    return f"_precast_{device_type}_region"


def _capture(device_type: str) -> Any:
    """What backward needs to run as the code that calls this."""
    return in_graph(device_type) if torch.compiler.is_dynamo_compiling() else current(device_type)


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
    if device_type is _REQUIRED or not isinstance(device_type, str):
        got = "none" if device_type is _REQUIRED else repr(device_type)
        raise RegionTypeError(
            f"{name} needs a device type as text; got {got}. Write @{name}(device_type='cuda'), "
            f"which is what torch.cuda.amp.{name} meant, or 'cpu' for tensors on the CPU."
        )
    autocast(device_type, enabled=False)  # refuses names that no autocast is known for
