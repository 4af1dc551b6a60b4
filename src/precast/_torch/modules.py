"""Modules: what runs while one is called, and its hooks.

Invariants:

- nothing here changes `torch.nn.Module` itself; `patches` does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final

import torch

__all__ = [
    "MODULE_CALL",
    "drop_forward_hook",
    "forward_hooks",
    "on_call_without_hooks",
]

# What is on the stack while a module runs, while backward runs, while an optimizer steps: `self` of the first is the
# module. Global hooks on modules would say the same, and have `torch.compile` warn (2.13).
MODULE_CALL: Final = torch.nn.Module._call_impl.__code__


def forward_hooks(module: torch.nn.Module) -> list[tuple[int, Any]]:
    """A module's forward hooks and pre-hooks, each with the number under which all that belongs to it is kept.

    Public API adds hooks, and nothing lists them (2.13).
    """
    return [*module._forward_pre_hooks.items(), *module._forward_hooks.items()]


def drop_forward_hook(module: torch.nn.Module, number: int) -> None:
    """Takes a hook off that somebody else added, or that a copy of a module came with (2.13)."""
    for kept in (
        module._forward_pre_hooks,
        module._forward_pre_hooks_with_kwargs,
        module._forward_hooks,
        module._forward_hooks_with_kwargs,
        module._forward_hooks_always_called,
    ):
        kept.pop(number, None)


def on_call_without_hooks(module: torch.nn.Module, call: Callable[..., Any]) -> Callable[[], None]:
    """Has ``call(module, run, args, kwargs)`` make each call of a module; calling what it returns ends that.

    For modules of which PyTorch asks whether they have hooks, to leave its fast path if so. What `Module.compile` sets
    is called in place of the module, and is in no copy of it; where that is set, nothing is done (2.13).
    """
    known = weakref.ref(module)
    if module._compiled_call_impl is not None or isinstance(module, torch.jit.ScriptModule):
        return lambda: None

    def called(*args: Any, **kwargs: Any) -> Any:
        there = known()
        assert there is not None
        plain: Any = there._call_impl
        if torch.compiler.is_dynamo_compiling():
            return plain(*args, **kwargs)
        return call(there, lambda: plain(*args, **kwargs), args, kwargs)

    def stop() -> None:
        there = known()
        if there is not None and vars(there).get("_compiled_call_impl") is called:
            del there._compiled_call_impl

    module._compiled_call_impl = called
    return stop
