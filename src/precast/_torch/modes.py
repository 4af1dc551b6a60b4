"""Dispatch modes and function modes: who sees the operations of this thread, and how to run some unseen.

Invariants:

- an `ObservingMode` changes nothing; the other modes of a thread are counted without it where that is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from precast._torch.dispatcher import dispatch_key, is_composite

__all__ = [
    "ObservingMode",
    "cast_without_torch_function",
    "count_other_modes",
    "dispatch_modes",
    "function_modes",
    "innermost_dispatch_mode",
    "innermost_other_mode",
    "leave_mode",
    "redispatch_in_mode",
    "without_dispatch",
    "without_torch_function",
    "writes_graph",
]

# How many `TorchDispatchMode`s are active in this thread; generated kernels (`engine.generated`) ask it at each call.
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack

# Whether a `TorchFunctionMode` is active in this thread; asked at each entry of a region.
function_modes: Callable[[], bool] = torch._C._is_torch_function_mode_enabled


class ObservingMode(TorchDispatchMode):
    """A `TorchDispatchMode` that sees what runs, and changes nothing: what is compiled is compiled as without it.

    The class is public, what it says of compilers is not (2.13): the compiler is to ignore it, its own code is not
    to be compiled (which costs 2 s of imports unless it is said here), and higher-order operators pass.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether the compiler may take no notice of it."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def leave_mode(mode: ObservingMode) -> None:
    """Ends a mode, wherever it is on this thread's stack; ``__exit__`` ends the innermost, whichever that is (2.13)."""
    module = torch.utils._python_dispatch
    above = []
    while innermost_dispatch_mode() is not mode:
        above.append(module._pop_mode())
    mode.__exit__(None, None, None)
    for other in reversed(above):
        module._push_mode(other)


_BELOW_MODES: Final = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.Python)

_LEFT_OUT: Final = [
    getattr(torch._C.DispatchKey, name) for name in ("ADInplaceOrView", "Negative", "Conjugate")
]


def redispatch_in_mode(
    mode: ObservingMode,
    op: Any,
    tensors: list[torch.Tensor],
    call: tuple[tuple[Any, ...], dict[str, Any]],
    casting: list[str],
) -> Any:
    """Calls an operation that a mode was told of, so that the mode is told of what that calls in turn.

    What a mode calls runs with all modes off and all keys above them excluded, autocast's too: what an operation calls
    is not seen, and casts nothing that it would cast without the mode. Nothing public calls it otherwise (2.13).

    Args:
        mode: the one that was told, in its ``__torch_dispatch__``.
        op: the operation.
        tensors: those that it was given.
        call: its arguments.
        casting: device types on which autocast is on where the program calls it.
    """
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
    for tensor in tensors:
        keys = keys | torch._C._dispatch_keys(tensor)
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in [*map(dispatch_key, casting), *(_LEFT_OUT if is_composite(op) else ())]:
        excluded = excluded.remove(key)
    args, kwargs = call
    with mode:
        included = torch._C._dispatch_tls_local_include_set()
        with torch._C._ForceDispatchKeyGuard(included, excluded):
            return op.redispatch(keys & _BELOW_MODES, *args, **kwargs)


def innermost_dispatch_mode() -> Any:
    """The `TorchDispatchMode` that sees an operation first, or None; the stack has no public reader (2.13)."""
    depth = dispatch_modes()
    return torch._C._get_dispatch_stack_at(depth - 1) if depth else None


def _other_modes() -> list[Any]:
    modes = map(torch._C._get_dispatch_stack_at, range(dispatch_modes()))
    return [mode for mode in modes if not isinstance(mode, ObservingMode)]


def count_other_modes() -> int:
    """How many dispatch modes of this thread do more than observe (2.13)."""
    return len(_other_modes())


def innermost_other_mode() -> Any:
    """The innermost of them, or None."""
    return next(reversed(_other_modes()), None)


_get_dispatch_mode = torch._C._get_dispatch_mode

_ModeKey = torch._C._TorchDispatchModeKey


def writes_graph() -> bool:
    """Whether a compiler or exporter runs this thread's operations without their numbers (2.13)."""
    return (
        _get_dispatch_mode(_ModeKey.FAKE) is not None
        or _get_dispatch_mode(_ModeKey.PROXY) is not None
    )


# A context whose operations no `TorchDispatchMode` and no tensor subclass sees: what measures a program, or reads a
# number that it computed, is no part of it (2.13).
without_dispatch: Callable[[], Any] = torch._C._DisableTorchDispatch

without_torch_function: Callable[[], Any] = torch._C.DisableTorchFunction
"""A context whose operations no subclass and no function mode hears: they are no calls of the program's (2.13)."""


def cast_without_torch_function(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`tensor` in `dtype`. No ``__torch_function__`` is asked: the program did not call a kernel's cast (2.13)."""
    cast = _CASTS.get(dtype)
    if cast is not None and type(tensor) in _WITHOUT_TORCH_FUNCTION and not function_modes():
        return cast(tensor)
    with without_torch_function():
        return tensor.to(dtype) if cast is None else cast(tensor)


_WITHOUT_TORCH_FUNCTION: Final = frozenset({torch.Tensor, torch.nn.Parameter})

_CASTS = {torch.bfloat16: torch.Tensor.bfloat16, torch.float16: torch.Tensor.half}
