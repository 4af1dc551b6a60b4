"""The hooks of a monitor: on each module of a model, on all optimizers, and on a scaler of PyTorch's.

Invariants:

- a copy of a model, by `deepcopy` or pickle, is not watched: its hooks do nothing;
- graphs of `torch.compile` and `torch.export` contain no hooks: of a compiled part, only the final outputs and
  gradients are recorded;
- after the stack that `install` returns is closed, nothing is left on the model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from precast import _torch
from precast._internal.locks import ForkSafeLock
from precast._torch.optimizer_hooks import on_optimizer_step
from precast.diagnostics.failures import Failures
from precast.diagnostics.numerics.running_step import RunningStep, may_write
from precast.diagnostics.numerics.tally import TensorKey
from precast.grad_scaler.scaler import GradScaler
from precast.policy.module_names import name_of_each

__all__ = ["follow", "install"]


class _HookReceiver(Protocol):
    """The interface of `ModelWatcher` for its hooks."""

    mutex: ForkSafeLock
    failures: Failures

    @property
    def running_whole(self) -> RunningStep | None: ...

    def on_model_start(self) -> None: ...

    def on_model_end(self) -> None: ...

    def on_module_start(self, name: str, args: Any, kwargs: Any) -> None: ...

    def on_module_end(
        self, key: TensorKey, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None: ...

    def before_optimizer_step(self, optimizer: Optimizer) -> None: ...

    def after_optimizer_step(self, optimizer: Optimizer) -> None: ...

    def on_scaler_update(self, scale: Any) -> None: ...


class _ModuleHooks:
    """The forward hooks of one module; in a copy of the model, hooks without a watcher."""

    def __init__(
        self, watcher: _HookReceiver | None = None, name: str = "", is_whole: bool = False
    ) -> None:
        self._watcher = watcher
        self.is_whole = is_whole
        self._key = "output", name

    def __reduce__(self) -> tuple[Any, ...]:
        return _ModuleHooks, ()

    @_torch.runs_uncompiled
    def enter(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        watcher = self._active_watcher()
        if watcher is not None:
            watcher.failures.call(self._key[1], self._on_start, watcher, args, kwargs)

    @_torch.runs_uncompiled
    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        watcher = self._active_watcher()
        if watcher is not None:
            call = module, args, kwargs, output
            watcher.failures.call(self._key[1], self._on_end, watcher, call)

    @_torch.runs_uncompiled
    def begin(self, _module: nn.Module, _args: Any) -> None:
        watcher = self._active_watcher()
        if watcher is not None:
            watcher.on_model_start()

    @_torch.runs_uncompiled
    def end(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if not torch.compiler.is_dynamo_compiling() and self._watcher is not None:
            self._watcher.on_model_end()

    def _on_start(self, watcher: _HookReceiver, args: Any, kwargs: Any) -> None:
        with watcher.mutex.lock:
            (watcher.running_whole or watcher).on_module_start(self._key[1], args, kwargs)

    def _on_end(self, watcher: _HookReceiver, call: tuple[nn.Module, Any, Any, Any]) -> None:
        with watcher.mutex.lock:
            (watcher.running_whole or watcher).on_module_end(self._key, *call)

    def _active_watcher(self) -> _HookReceiver | None:
        """Return the watcher; None in a copy of the model, and while no values are computed."""
        is_traced = torch.compiler.is_dynamo_compiling() or not _torch.is_real()
        return None if is_traced else self._watcher

    def around(self, module: nn.Module, run: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        """Run a call between the hooks, for a module whose result hooks would change."""
        if self.is_whole:
            self.begin(module, args)
        try:
            if may_write(module):
                self.enter(module, args, kwargs)
            output = run()
            self.leave(module, args, kwargs, output)
            return output
        finally:
            if self.is_whole:
                self.end(module, args, None)


def install(model: nn.Module, watcher: _HookReceiver) -> ExitStack:
    """Put hooks on each module of `model`, once, and on all optimizers. Closing the stack removes them."""
    stack = ExitStack()
    # These leave PyTorch's fast path if they, or modules in them, have hooks.
    layers = (m for m in model.modules() if isinstance(m, nn.TransformerEncoderLayer))
    without_hooks = {id(module) for layer in layers for module in layer.modules()}
    for name, module in name_of_each(model):
        hook = _ModuleHooks(watcher, name, module is model)
        if id(module) in without_hooks:
            stack.callback(_torch.on_call_without_hooks(module, hook.around))
        else:
            for handle in _hooks_on(module, hook):
                stack.callback(handle.remove)
    before = _weak_call(watcher.before_optimizer_step)
    after = _weak_call(watcher.after_optimizer_step)
    stack.callback(on_optimizer_step(before=before, after=after))
    return stack


def _hooks_on(module: nn.Module, hook: _ModuleHooks) -> list[Any]:
    # Not `module.register...`, which raises for a scripted module, although its hooks are called.
    handles = [nn.Module.register_forward_hook(module, hook.leave, with_kwargs=True)]
    if hook.is_whole:
        handles.append(nn.Module.register_forward_pre_hook(module, hook.begin))
        handles.append(nn.Module.register_forward_hook(module, hook.end, always_call=True))
    if may_write(module):
        handles.append(nn.Module.register_forward_pre_hook(module, hook.enter, with_kwargs=True))
    return handles


def follow(scaler: Any, watcher: _HookReceiver) -> Callable[[], None]:
    """Report the updates of a scaler of PyTorch's to a watcher; return a function that ends this."""
    if scaler is None or isinstance(scaler, GradScaler):
        return lambda: None
    plain_update, report = scaler.update, _weak_call(watcher.on_scaler_update)

    def update(*args: Any, **kwargs: Any) -> Any:
        report(_torch.scale_of(scaler))
        return plain_update(*args, **kwargs)

    def leave() -> None:
        if vars(scaler).get("update") is update:
            del scaler.update

    scaler.update = update
    return leave


def _weak_call(method: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a function that calls a method while its object exists: these hooks must not keep the watcher alive."""
    reference = weakref.WeakMethod(method)

    def call(argument: Any) -> None:
        alive = reference()
        if alive is not None:
            alive(argument)

    return call
