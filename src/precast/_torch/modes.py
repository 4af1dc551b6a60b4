"""Dispatch modes and function modes: those active in this thread, and how to run operations unseen by them.

Invariants:

- an `ObservingMode` changes no result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from precast._torch.dispatcher import dispatch_key, has_kernel, is_composite

__all__ = [
    "DispatchMode",
    "ObservingMode",
    "SkipMetaRandom",
    "calls_torch_function",
    "cast_without_torch_function",
    "dispatch_modes",
    "enter_function_mode",
    "function_modes",
    "impl_address",
    "isolated",
    "leave_function_mode",
    "leave_mode",
    "other_modes",
    "redispatch_in_mode",
    "runs_on_fake_tensors",
    "unseen_by_modes",
    "without_dispatch",
    "without_modes",
    "without_subclass_functions",
    "without_torch_function",
]

dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Return the number of active `TorchDispatchMode`s in this thread; kernels call it for each weight (2.13)."""

function_modes: Callable[[], bool] = torch._C._is_torch_function_mode_enabled
"""Return True if a `TorchFunctionMode` is active in this thread; regions call it at each entry (2.13)."""


class DispatchMode(TorchDispatchMode):
    """A `TorchDispatchMode` without the protection from Dynamo.

    The protection costs 2 s of imports, and some microseconds per operation. The method that requests it is private
    (2.13).
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class ObservingMode(DispatchMode):
    """A mode that observes operations and changes nothing, not even compiled code.

    The two settings are not public (2.13): compilers ignore the mode, and higher-order operators do not refuse it.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: the compiler may ignore this mode."""
        return True


class SkipMetaRandom(DispatchMode):
    """A mode that skips random initialisation of meta tensors, which have no data.

    PyTorch (2.13) runs these operations through Python code that imports Dynamo, which takes longer than all other
    imports of a process.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if (
            torch.Tag.nondeterministic_seeded in func.tags
            and func._schema.is_mutable
            and isinstance(args[0], torch.Tensor)
            and args[0].is_meta
        ):
            return args[0]
        return func(*args, **(kwargs or {}))


@contextmanager
def isolated() -> Iterator[None]:
    """Run operations as at the start of a thread: outside of all modes, transforms, traces and regions (2.13).

    For tensors that precast creates once for the process, at any time during the program.
    """
    keys = torch._C.DispatchKey
    included = torch._C.DispatchKeySet(keys.BackendSelect) | torch._C.DispatchKeySet(
        keys.ADInplaceOrView
    )
    excluded = torch._C._dispatch_tls_local_exclude_set()
    with torch._C._InferenceMode(False), without_torch_function():
        with torch._C._ForceDispatchKeyGuard(included, excluded):
            yield


def leave_mode(mode: ObservingMode) -> None:
    """End a mode anywhere on this thread's stack; its ``__exit__`` would end the innermost mode (2.13)."""
    module = torch.utils._python_dispatch
    above = []
    while (innermost := module._pop_mode()) is not mode:
        above.append(innermost)
    module._push_mode(mode)
    mode.__exit__(None, None, None)
    for other in reversed(above):
        module._push_mode(other)


def enter_function_mode(mode: TorchFunctionMode) -> None:
    """Make a function mode the innermost one of this thread, unless the thread has already entered it (2.13)."""
    if mode not in torch.overrides._get_current_function_mode_stack():
        torch.overrides._push_mode(mode)


def leave_function_mode(mode: TorchFunctionMode) -> None:
    """Remove a function mode from anywhere on this thread's stack.

    Its ``__exit__`` would remove the innermost mode, which may be another one after Ctrl-C (2.13).
    """
    above = []
    while mode in torch.overrides._get_current_function_mode_stack():
        above.append(torch.overrides._pop_mode())
    for other in reversed(above):
        if other is not mode:
            torch.overrides._push_mode(other)


_BELOW_MODES: Final = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.Python)

_VIEWS: Final = "ADInplaceOrView"


def redispatch_in_mode(
    mode: ObservingMode,
    op: Any,
    tensors: list[torch.Tensor],
    call: tuple[tuple[Any, ...], dict[str, Any]],
    casting: list[str],
) -> Any:
    """Call an operation from a mode's ``__torch_dispatch__`` such that the mode also sees the operations inside it.

    An ordinary call runs with all modes off and with the autocast keys excluded: the mode would see no inner
    operations, and their casts would be missing. No public function does this (2.13).

    `tensors` are those among the arguments of the `call`, and `casting` are the device types with autocast on where the
    program calls the operation.
    """
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
    for tensor in tensors:
        keys = keys | torch._C._dispatch_keys(tensor)
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in [*map(dispatch_key, casting), *_passed_inside(op)]:
        excluded = excluded.remove(key)
    args, kwargs = call
    with mode:
        included = torch._C._dispatch_tls_local_include_set()
        with torch._C._ForceDispatchKeyGuard(included, excluded):
            return op.redispatch(keys & _BELOW_MODES, *args, **kwargs)


@functools.cache
def _passed_inside(op: Any) -> list[Any]:
    """Return the keys that are excluded when a mode sees a composite, but not for the operations inside it.

    `chunk` and `narrow` make views at ADInplaceOrView themselves, so the operations inside must not (2.13).
    """
    if not is_composite(op):
        return []
    names = ["Negative", "Conjugate", *([] if has_kernel(op, _VIEWS) else [_VIEWS])]
    return [getattr(torch._C.DispatchKey, name) for name in names]


def other_modes() -> list[Any]:
    """Return the dispatch modes of this thread that do more than observe, outermost first; no public list (2.13)."""
    modes = map(torch._C._get_dispatch_stack_at, range(dispatch_modes()))
    return [mode for mode in modes if not isinstance(mode, ObservingMode)]


_get_dispatch_mode = torch._C._get_dispatch_mode

_ModeKey = torch._C._TorchDispatchModeKey


def runs_on_fake_tensors() -> bool:
    """Return True if a compiler or exporter runs this thread's operations on fake tensors (2.13)."""
    return (
        _get_dispatch_mode(_ModeKey.FAKE) is not None
        or _get_dispatch_mode(_ModeKey.PROXY) is not None
    )


without_dispatch: Callable[[], Any] = torch._C._DisableTorchDispatch
"""A context whose operations no `TorchDispatchMode` and no tensor subclass sees: for code that measures a program or
reads its values (2.13)."""

without_torch_function: Callable[[], Any] = torch._C.DisableTorchFunction
"""A context whose operations no tensor subclass and no function mode sees: for calls by precast itself (2.13)."""


without_subclass_functions: Callable[[], Any] = torch._C.DisableTorchFunctionSubclass
"""A context in which tensor subclasses are treated as plain tensors; function modes still see the calls (2.13)."""


def impl_address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's TensorImpl, its identity in compiled code; not public (2.11 to 2.15)."""
    if not function_modes():
        return tensor._cdata
    with without_torch_function():
        return tensor._cdata


def cast_without_torch_function(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast `tensor` to `dtype` without ``__torch_function__``, because the program did not call this cast (2.13)."""
    cast = _CASTS.get(dtype)
    if cast is not None and type(tensor) in _WITHOUT_TORCH_FUNCTION and not function_modes():
        return cast(tensor)
    with without_torch_function():
        return tensor.to(dtype) if cast is None else cast(tensor)


_WITHOUT_TORCH_FUNCTION: Final = frozenset({torch.Tensor, torch.nn.Parameter})

_CASTS = {torch.bfloat16: torch.Tensor.bfloat16, torch.float16: torch.Tensor.half}


def calls_torch_function(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if reading an attribute of these arguments would call a ``__torch_function__`` (2.13).

    The public `torch.overrides.has_torch_function` is the same C function.
    """
    if function_modes() or _has_torch_function(args):
        return True
    several = (*args, *kwargs.values()) if kwargs else args
    return any(_has_torch_function(v) for v in several if isinstance(v, list | tuple)) or (
        bool(kwargs) and _has_torch_function(several)
    )


_has_torch_function: Callable[[Any], bool] = torch._C._has_torch_function


def unseen_by_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose operations no tensor subclass and no function mode sees."""

    def call(*args: Any) -> Any:
        with without_torch_function():
            return function(*args)

    return call


def without_modes() -> Any:
    """Return a context in which no dispatch mode, and no graph recorder, sees this thread's operations (2.13)."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()
