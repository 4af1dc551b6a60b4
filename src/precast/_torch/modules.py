"""Modules: the code object of a call, hooks, and the module's own tensors.

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
    "apply_convolution",
    "drop_forward_hook",
    "forward_hooks",
    "on_call_without_hooks",
    "on_deepcopy",
    "own_buffers",
    "own_modules",
    "own_tensors",
]

MODULE_CALL: Final = torch.nn.Module._call_impl.__code__
"""The code object that is on the stack while a module runs; its local `self` is the module. Hooks for all modules would
give the same, but with them `torch.compile` warns (2.13)."""


def apply_convolution(
    module: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return the result of a convolution module with other tensors than its own; no public method does (2.13)."""
    result: torch.Tensor = module._conv_forward(input, weight, bias)
    return result


def forward_hooks(module: torch.nn.Module) -> list[tuple[int, Any]]:
    """Return a module's forward hooks and pre-hooks with their ids; no public function lists them (2.13)."""
    return [*module._forward_pre_hooks.items(), *module._forward_hooks.items()]


def drop_forward_hook(module: torch.nn.Module, number: int) -> None:
    """Remove a hook without its handle: one that other code added, or that came with a copied module (2.13)."""
    for hooks in (
        module._forward_pre_hooks,
        module._forward_pre_hooks_with_kwargs,
        module._forward_hooks,
        module._forward_hooks_with_kwargs,
        module._forward_hooks_always_called,
    ):
        hooks.pop(number, None)


def on_call_without_hooks(module: torch.nn.Module, call: Callable[..., Any]) -> Callable[[], None]:
    """Run each call of a module as ``call(module, run, args, kwargs)``; return a function that ends that.

    For modules that leave PyTorch's fast path if they have hooks. It sets the attribute that `Module.compile` sets: a
    function that is called instead of the module and is not copied with it. If it is already set, nothing is done
    (2.13).
    """
    reference = weakref.ref(module)
    if module._compiled_call_impl is not None or isinstance(module, torch.jit.ScriptModule):
        return lambda: None

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        target = reference()
        assert target is not None
        plain: Any = target._call_impl
        if torch.compiler.is_dynamo_compiling():
            return plain(*args, **kwargs)
        return call(target, lambda: plain(*args, **kwargs), args, kwargs)

    def stop() -> None:
        target = reference()
        if target is not None and vars(target).get("_compiled_call_impl") is wrapper:
            del target._compiled_call_impl

    module._compiled_call_impl = wrapper
    return stop


def own_tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return a module's own parameters and buffers; the public iterators take ten times as long (2.13)."""
    both = (*module._parameters.values(), *module._buffers.values())
    return [tensor for tensor in both if tensor is not None]


def own_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the dictionary from which a module reads its own buffers (2.13).

    No public function replaces a buffer that is None, or by one of another shape, without checks.
    """
    return module._buffers


def own_modules(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the direct children of a module; the public iterator takes ten times as long (2.13)."""
    return [child for child in module._modules.values() if child is not None]


class _HooksWithCopyCallback(OrderedDict[int, Any]):
    """A dict of hooks that calls a function when it is deep-copied. The copy, or a pickle, is an ordinary dict."""

    def __init__(self, hooks: Mapping[int, Any], on_copy: Callable[[dict[int, Any]], None]) -> None:
        super().__init__(hooks)
        self._on_copy = on_copy

    def __deepcopy__(self, memo: dict[int, Any]) -> OrderedDict[int, Any]:
        self._on_copy(memo)
        return copy.deepcopy(OrderedDict(self), memo)

    def __reduce__(self) -> Any:
        return OrderedDict(self).__reduce__()


def on_deepcopy(
    module: torch.nn.Module, on_copy: Callable[[dict[int, Any]], None]
) -> Callable[[], None]:
    """Call ``on_copy(memo)`` whenever a module is deep-copied; return a function that ends that.

    There is no public event for a copy, and a method of the module would be copied and pickled with it. So a dict of
    hooks that no call of the module reads is replaced by one that detects its copy, which follows that of the
    parameters (2.13). Scripted modules are copied in another way, and are left unchanged.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return lambda: None
    reference = weakref.ref(module)
    hooks = _HooksWithCopyCallback(module._load_state_dict_post_hooks, on_copy)
    module._load_state_dict_post_hooks = hooks

    def stop() -> None:
        target = reference()
        if target is not None and target._load_state_dict_post_hooks is hooks:
            target._load_state_dict_post_hooks = OrderedDict(hooks)

    return stop
