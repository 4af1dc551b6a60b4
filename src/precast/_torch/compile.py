"""`torch.compile` and `torch.export`: which functions they trace, and what they are told of regions.

Invariants:

- nothing here imports Dynamo: what asks about it asks only where the program has loaded it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = [
    "export_region",
    "has_compiled",
    "never_compiled",
    "reset_compiler",
    "runs_uncompiled",
    "traced_as_constant",
]

F = TypeVar("F", bound=Callable[..., Any])


def runs_uncompiled(function: F) -> F:
    """Has a function that Python calls, and all that it calls, run as they are, also in a compiled program.

    A function that is traced may still have it traced along: that is what `never_compiled` refuses, too (2.13).
    """
    skip = torch._C._dynamo.eval_frame._FrameAction.SKIP
    strategy = torch._C._dynamo.eval_frame._FrameExecStrategy(skip, skip)
    torch._C._dynamo.eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


def never_compiled(function: F) -> F:
    """Has `torch.compile` break its graph at a function, and run it and all that it calls as they are.

    As `torch.compiler.disable` does, which costs 2 s of imports, and a second call at each call (2.13). For what
    changes the state of the dispatcher: traced, it would do so once, and never again when the graph runs.
    """
    vars(function)["_torchdynamo_disable"] = True
    vars(function)["_torchdynamo_disable_msg"] = "this part of precast does not enter a graph"
    return runs_uncompiled(function)


def traced_as_constant(function: F) -> F:
    """Has `torch.compile` call a function when it traces, and put the answer into the graph.

    As `torch.compiler.assume_constant_result` does, which costs 2 s of imports (2.13).
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function


def has_compiled() -> bool:
    """Whether `torch.compile` has compiled something in this process; its counters are documented for no use (2.13)."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"])


def reset_compiler() -> None:
    """Drops what `torch.compile` made in this process, if it made anything; does not load it to find out.

    In the middle of a compilation, where PyTorch refuses, it stays: only the garbage collector comes then, for a model
    that is gone. `CompileContext` is what PyTorch's own guards ask (2.11 to 2.15).
    """
    if "torch._dynamo" in sys.modules and torch._guards.CompileContext.current_compile_id() is None:
        torch.compiler.reset()


def export_region(arguments: tuple[Any, ...] | None) -> bool:
    """Tells `torch.export`, where it runs a program to write it down, that a region begins, or (None) that it ends.

    As PyTorch's own region does: the exporter is a function mode, and nothing public reaches it (2.13).

    Returns:
        Whether there is an exporter.
    """
    amp: Any = torch.amp
    exporter = torch.fx.experimental.proxy_tensor.PreDispatchTorchFunctionMode
    for mode in torch.overrides._get_current_function_mode_stack():
        if isinstance(mode, exporter):
            function = amp._enter_autocast if arguments else amp._exit_autocast
            mode.__torch_function__(function, (), arguments or ())
            return True
    return False
