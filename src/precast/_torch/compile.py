"""`torch.compile` and `torch.export`: the functions that they trace, and the regions that they record.

Invariants:

- nothing here imports Dynamo. It is used only if the program has loaded it.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from functools import cache, partial, wraps
from types import FunctionType
from typing import Any, TypeVar

import torch

__all__ = [
    "defers_signals",
    "export_region",
    "guard_autocast_dtype",
    "has_compiled",
    "never_compiled",
    "reset_compiler",
    "runs_uncompiled",
    "traced_as_constant",
]

F = TypeVar("F", bound=Callable[..., Any])


def runs_uncompiled(function: F) -> F:
    """Exclude a function, and everything that it calls, from `torch.compile` when Python calls it.

    It may still be traced as a part of another compiled function; `never_compiled` prevents that too (2.13).
    """
    skip = torch._C._dynamo.eval_frame._FrameAction.SKIP
    strategy = torch._C._dynamo.eval_frame._FrameExecStrategy(skip, skip)
    torch._C._dynamo.eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


def never_compiled(function: F) -> F:
    """Make `torch.compile` break its graph at a function, and run it and everything that it calls in eager mode.

    For functions that change the dispatcher's state: a traced one would change it during tracing, and never when the
    graph runs. `torch.compiler.disable` does the same, but costs 2 s of imports and one more call per call (2.13).
    """
    vars(function)["_torchdynamo_disable"] = True
    vars(function)["_torchdynamo_disable_msg"] = "this part of precast does not enter a graph"
    return runs_uncompiled(function)


def defers_signals(function: F) -> F:
    """Make a function handle signals after its first call, not when it starts.

    CPython (3.11 to 3.14) handles signals at the start of a function, after calls and at the end of a turn of a loop.
    No `try` in the function sees an exception at its start. RESUME with an argument above 1 leaves the start out, and
    Dynamo, which refuses that, inlines the function as it was (2.13).
    """
    own: Any = function
    code = bytearray(own.__code__.co_code)
    start = next(each for each in dis.get_instructions(own) if each.opname == "RESUME")
    code[start.offset + 1] = 2
    deferring: Any = wraps(own)(
        FunctionType(own.__code__.replace(co_code=bytes(code)), own.__globals__)
    )
    deferring.__defaults__, deferring.__kwdefaults__ = own.__defaults__, own.__kwdefaults__
    vars(deferring)["_torchdynamo_inline"] = function
    result: F = runs_uncompiled(deferring)
    return result


def traced_as_constant(function: F) -> F:
    """Make `torch.compile` call a function while tracing, and use its result as a constant of the graph.

    `torch.compiler.assume_constant_result` does the same, but costs 2 s of imports (2.13).
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function


def guard_autocast_dtype(device_type: str) -> None:
    """Recompile the function that Dynamo is tracing when its callers have another autocast dtype.

    PyTorch's guards compare the dtype only if autocast is on. No public function adds a guard (2.13). Does nothing if
    Dynamo is not tracing.
    """
    context = torch._guards.TracingContext.try_get()
    if context is None or torch.compiler.is_exporting():
        return
    source = sys.modules["torch._dynamo.source"].GlobalStateSource()
    context.guards_context.dynamo_guards.add(torch._guards.Guard(source, _dtype_guard(device_type)))


@cache  # guards are deduplicated by the identity of these functions
def _dtype_guard(device_type: str) -> Callable[[Any, Any], None]:
    return partial(_add_dtype_guard, device_type)


def _add_dtype_guard(device_type: str, builder: Any, guard: Any) -> None:
    """Guard the present dtype, which is the caller's: the regions of the traced function have ended."""
    dtype = torch.get_autocast_dtype(device_type)

    def is_same(_: Any) -> bool:
        return torch.get_autocast_dtype(device_type) is dtype

    text = [f"torch.get_autocast_dtype({device_type!r}) is {dtype}"]
    builder.guard_manager.root.add_lambda_guard(is_same, text, guard.user_stack)


def has_compiled() -> bool:
    """Return True if `torch.compile` has compiled something in this process, from its undocumented counters (2.13)."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"])


def reset_compiler() -> None:
    """Drop all code that `torch.compile` has compiled in this process, if it is loaded.

    PyTorch refuses this during a compilation, and while it imports the compiler in the first step of an optimizer. Only
    the garbage collector calls this function then, for a freed model, and nothing is dropped. PyTorch's own guards also
    read `CompileContext` (2.11 to 2.15).
    """
    is_loaded = hasattr(sys.modules.get("torch._dynamo"), "reset")
    if is_loaded and torch._guards.CompileContext.current_compile_id() is None:
        torch.compiler.reset()


def export_region(arguments: tuple[Any, ...] | None) -> bool:
    """Record the begin or end of a region in `torch.export`, if it is exporting in this thread.

    PyTorch's regions do the same. The exporter is a function mode that no public function returns (2.13).

    Args:
        arguments: the arguments of the region that begins; None if a region ends.

    Returns:
        True if an export is running.
    """
    amp: Any = torch.amp
    exporter = torch.fx.experimental.proxy_tensor.PreDispatchTorchFunctionMode
    for mode in torch.overrides._get_current_function_mode_stack():
        if isinstance(mode, exporter):
            function = amp._enter_autocast if arguments else amp._exit_autocast
            mode.__torch_function__(function, (), arguments or ())
            return True
    return False
