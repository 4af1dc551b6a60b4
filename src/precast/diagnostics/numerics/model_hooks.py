"""The hooks of a monitor: on each module of a model, on all optimizers, and on a scaler of PyTorch's.

Invariants:
- a copy of a model, by `deepcopy` or pickle, is not watched: its hooks do nothing;
- what `torch.compile` or `torch.export` traces has none of this in it: of a compiled part, outputs and gradients are
  seen where it ends;
- after the stack that `install` gives is closed, nothing is left on the model.
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
from precast.diagnostics.numerics.tally import Key
from precast.grad_scaler.scaler import GradScaler
from precast.policy.module_names import name_of_each

__all__ = ["follow", "install"]


class _Watcher(Protocol):
    """A monitor, as its hooks see it; the methods of `Monitor` say when each is called."""

    mutex: ForkSafeLock
    failures: Failures

    @property
    def running_whole(self) -> RunningStep | None: ...

    def begins(self) -> None: ...

    def ends(self) -> None: ...

    def given(self, name: str, args: Any, kwargs: Any) -> None: ...

    def called(self, key: Key, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None: ...

    def steps_now(self, optimizer: Optimizer) -> None: ...

    def has_stepped(self, optimizer: Optimizer) -> None: ...

    def updated(self, scale: Any) -> None: ...


class _Watched:
    """The forward hooks of one module; in a copy of the model, hooks that tell nobody."""

    def __init__(
        self, watcher: _Watcher | None = None, name: str = "", is_whole: bool = False
    ) -> None:
        self._watcher = watcher
        self.is_whole = is_whole
        self._key = "output", name

    def __reduce__(self) -> tuple[Any, ...]:
        return _Watched, ()

    @_torch.runs_uncompiled
    def enter(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        watcher = self._told()
        if watcher is not None:
            watcher.failures.call(self._key[1], self._tell_given, watcher, args, kwargs)

    @_torch.runs_uncompiled
    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        watcher = self._told()
        if watcher is not None:
            call = module, args, kwargs, output
            watcher.failures.call(self._key[1], self._tell_called, watcher, call)

    @_torch.runs_uncompiled
    def begin(self, _module: nn.Module, _args: Any) -> None:
        watcher = self._told()
        if watcher is not None:
            watcher.begins()

    @_torch.runs_uncompiled
    def end(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if not torch.compiler.is_dynamo_compiling() and self._watcher is not None:
            self._watcher.ends()

    def _tell_given(self, watcher: _Watcher, args: Any, kwargs: Any) -> None:
        with watcher.mutex.lock:
            (watcher.running_whole or watcher).given(self._key[1], args, kwargs)

    def _tell_called(self, watcher: _Watcher, call: tuple[nn.Module, Any, Any, Any]) -> None:
        with watcher.mutex.lock:
            (watcher.running_whole or watcher).called(self._key, *call)

    def _told(self) -> _Watcher | None:
        """The monitor that is told; None in a copy of the model, and where no numbers are computed."""
        is_traced = torch.compiler.is_dynamo_compiling() or not _torch.is_real()
        return None if is_traced else self._watcher

    def around(self, module: nn.Module, run: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        """All of these around a call, where hooks would change what the module does."""
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


def install(model: nn.Module, watcher: _Watcher) -> ExitStack:
    """Puts hooks on each module of `model`, once, and on all optimizers; closing the stack takes them off."""
    stack = ExitStack()
    # These leave PyTorch's fast path if they, or modules in them, have hooks.
    layers = (m for m in model.modules() if isinstance(m, nn.TransformerEncoderLayer))
    asked_for_hooks = {id(module) for layer in layers for module in layer.modules()}
    for name, module in name_of_each(model):
        hook = _Watched(watcher, name, module is model)
        if id(module) in asked_for_hooks:
            stack.callback(_torch.on_call_without_hooks(module, hook.around))
        else:
            for handle in _hooks_on(module, hook):
                stack.callback(handle.remove)
    before, after = _telling(watcher.steps_now), _telling(watcher.has_stepped)
    stack.callback(on_optimizer_step(before=before, after=after))
    return stack


def _hooks_on(module: nn.Module, hook: _Watched) -> list[Any]:
    # Not `module.register...`: that of a scripted module refuses, though its hooks are called.
    handles = [nn.Module.register_forward_hook(module, hook.leave, with_kwargs=True)]
    if hook.is_whole:
        handles.append(nn.Module.register_forward_pre_hook(module, hook.begin))
        handles.append(nn.Module.register_forward_hook(module, hook.end, always_call=True))
    if may_write(module):
        handles.append(nn.Module.register_forward_pre_hook(module, hook.enter, with_kwargs=True))
    return handles


def follow(scaler: Any, watcher: _Watcher) -> Callable[[], None]:
    """Hears of the updates of a scaler of PyTorch's, which tells nobody; what undoes that is returned."""
    if scaler is None or isinstance(scaler, GradScaler):
        return lambda: None
    plain_update, tell = scaler.update, _telling(watcher.updated)

    def update(*args: Any, **kwargs: Any) -> Any:
        tell(_torch.scale_of(scaler))
        return plain_update(*args, **kwargs)

    def leave() -> None:
        if vars(scaler).get("update") is update:
            del scaler.update

    scaler.update = update
    return leave


def _telling(method: Callable[[Any], None]) -> Callable[[Any], None]:
    """A call of a monitor's method as long as there is the monitor: these hooks must not keep it, or its model."""
    known = weakref.WeakMethod(method)

    def tell(what: Any) -> None:
        there = known()
        if there is not None:
            there(what)

    return tell
