"""Modules: the code that calls one, and its hooks.

Invariants:

- nothing here changes `torch.nn.Module` itself; `patches` does.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

__all__ = [
    "MODULE_CALL",
    "convolved",
    "drop_forward_hook",
    "forward_hooks",
    "on_call_without_hooks",
    "on_deepcopy",
    "own_buffers",
    "own_modules",
    "own_tensors",
]

MODULE_CALL: Final = torch.nn.Module._call_impl.__code__
"""The code that is on the stack while a module runs; its `self` is the module. Hooks for all modules would say the
same, but with them `torch.compile` warns (2.13)."""


def convolved(
    module: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """What a convolution of PyTorch's computes with other tensors than its own; nothing public takes these (2.13)."""
    result: torch.Tensor = module._conv_forward(input, weight, bias)
    return result


def forward_hooks(module: torch.nn.Module) -> list[tuple[int, Any]]:
    """A module's forward hooks and pre-hooks, each with its number; nothing public lists them (2.13)."""
    return [*module._forward_pre_hooks.items(), *module._forward_hooks.items()]


def drop_forward_hook(module: torch.nn.Module, number: int) -> None:
    """Removes a hook without its handle: one that somebody else added, or that a copied module came with (2.13)."""
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

    It is for modules that leave PyTorch's fast path if they have hooks. It sets what `Module.compile` sets: a function
    that is called in place of the module and is not copied with it. Where there is one already, nothing is done (2.13).
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


def own_tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return a module's own parameters and buffers; the public iterators take ten times as long (2.13)."""
    both = (*module._parameters.values(), *module._buffers.values())
    return [tensor for tensor in both if tensor is not None]


def own_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Return a module's own buffers by name, in the dictionary that the module reads them from (2.13).

    Nothing public replaces a buffer that is None, or by one of another shape, without checks.
    """
    return module._buffers


def own_modules(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules directly in a module; the public iterator takes ten times as long (2.13)."""
    return [child for child in module._modules.values() if child is not None]


class _HeardCopies(OrderedDict[int, Any]):
    """Hooks of a module that a deep copy of the module has as an ordinary dict, as a pickle does."""

    def __init__(self, hooks: Mapping[int, Any], heard: Callable[[dict[int, Any]], None]) -> None:
        super().__init__(hooks)
        self._heard = heard

    def __deepcopy__(self, memo: dict[int, Any]) -> OrderedDict[int, Any]:
        self._heard(memo)
        return copy.deepcopy(OrderedDict(self), memo)

    def __reduce__(self) -> Any:
        return OrderedDict(self).__reduce__()


def on_deepcopy(
    module: torch.nn.Module, heard: Callable[[dict[int, Any]], None]
) -> Callable[[], None]:
    """Have ``heard(memo)`` called whenever a module is deep-copied; calling the result ends that.

    Nothing public tells of a copy, and a method of the module's own would be copied and pickled with it. So a dict of
    hooks that no call of the module reads is replaced by one that knows when it is copied, which comes after the
    module's parameters (2.13). Scripted modules copy themselves otherwise, and are left alone.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return lambda: None
    reference = weakref.ref(module)
    hooks = _HeardCopies(module._load_state_dict_post_hooks, heard)
    module._load_state_dict_post_hooks = hooks

    def stop() -> None:
        there = reference()
        if there is not None and there._load_state_dict_post_hooks is hooks:
            there._load_state_dict_post_hooks = OrderedDict(hooks)

    return stop
