"""`torch.compile` and `torch.export`: which functions they trace, and what they are told of regions.

Invariants:

- nothing here imports Dynamo: questions about it are asked only if the program has loaded it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any, TypeVar

import torch

__all__ = [
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
    """Has `torch.compile` leave a function, and all that it calls, alone when Python calls it.

    It may still be traced as a part of another function that is compiled; `never_compiled` prevents that too (2.13).
    """
    skip = torch._C._dynamo.eval_frame._FrameAction.SKIP
    strategy = torch._C._dynamo.eval_frame._FrameExecStrategy(skip, skip)
    torch._C._dynamo.eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


def never_compiled(function: F) -> F:
    """Has `torch.compile` break its graph at a function, and run it and all that it calls as they are.

    It is for functions that change the state of the dispatcher: if one were traced, it would change the state while it
    is traced, and never when the graph runs. `torch.compiler.disable` does the same, but it costs 2 s of imports, and
    one more call at each call (2.13).
    """
    vars(function)["_torchdynamo_disable"] = True
    vars(function)["_torchdynamo_disable_msg"] = "this part of precast does not enter a graph"
    return runs_uncompiled(function)


def traced_as_constant(function: F) -> F:
    """Has `torch.compile` call a function when it traces, and put what it returns into the graph as a constant.

    `torch.compiler.assume_constant_result` does the same, but it costs 2 s of imports (2.13).
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function


def guard_autocast_dtype(device_type: str) -> None:
    """Have the function that Dynamo traces compiled again for another autocast dtype of its callers.

    PyTorch's own guards compare the dtype only where autocast is on. Nothing public adds a guard (2.13). Without Dynamo
    this does nothing.
    """
    context = torch._guards.TracingContext.try_get()
    if context is None or torch.compiler.is_exporting():
        return
    source = sys.modules["torch._dynamo.source"].GlobalStateSource()
    context.guards_context.dynamo_guards.add(torch._guards.Guard(source, _dtype_guard(device_type)))


@cache  # a set of guards knows them by the identity of these functions
def _dtype_guard(device_type: str) -> Callable[[Any, Any], None]:
    return partial(_add_dtype_guard, device_type)


def _add_dtype_guard(device_type: str, builder: Any, guard: Any) -> None:
    """Compare the dtype with the present one, which is the caller's: regions of the traced function have ended."""
    dtype = torch.get_autocast_dtype(device_type)

    def is_same(_: Any) -> bool:
        return torch.get_autocast_dtype(device_type) is dtype

    text = [f"torch.get_autocast_dtype({device_type!r}) is {dtype}"]
    builder.guard_manager.root.add_lambda_guard(is_same, text, guard.user_stack)


def has_compiled() -> bool:
    """Whether `torch.compile` has compiled something in this process; only its undocumented counters say so (2.13)."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"])


def reset_compiler() -> None:
    """Drops what `torch.compile` made in this process; does nothing where it is not loaded.

    PyTorch refuses this in the middle of a compilation, and cannot do it while the compiler is being loaded, which the
    first step of an optimizer does. Only the garbage collector calls it then, for a model that is gone, and nothing is
    dropped. PyTorch's own guards ask `CompileContext` as well (2.11 to 2.15).
    """
    is_loaded = hasattr(sys.modules.get("torch._dynamo"), "reset")
    if is_loaded and torch._guards.CompileContext.current_compile_id() is None:
        torch.compiler.reset()


def export_region(arguments: tuple[Any, ...] | None) -> bool:
    """Tells `torch.export`, if it is exporting what runs in this thread, that a region begins or ends.

    PyTorch's own regions do the same: the exporter is a function mode, and nothing public reaches it (2.13).

    Args:
        arguments: those of the region that begins; None where one ends.

    Returns:
        Whether something is being exported.
    """
    amp: Any = torch.amp
    exporter = torch.fx.experimental.proxy_tensor.PreDispatchTorchFunctionMode
    for mode in torch.overrides._get_current_function_mode_stack():
        if isinstance(mode, exporter):
            function = amp._enter_autocast if arguments else amp._exit_autocast
            mode.__torch_function__(function, (), arguments or ())
            return True
    return False
