"""The hooks of a monitor: on each module of a model, on all optimizers, and on a scaler of PyTorch's.

Invariants:
- a copy of a model, by `deepcopy` or pickle, is not watched: its hooks do nothing;
- what `torch.compile` or `torch.export` traces has none of this in it: of a compiled part, outputs and gradients are
  seen where it ends;
- after `remove` nothing is left on the model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
)
from torch.utils.weak import WeakIdKeyDictionary

from precast import _torch
from precast._internal.locks import ForkSafeLock
from precast._torch.optimizer_hooks import on_optimizer_step
from precast.grad_scaler.scaler import GradScaler
from precast.policy.module_names import name_of_each

__all__ = ["Installed", "Optimizers", "Watcher", "follow", "install", "may_write", "unseen"]


R = TypeVar("R")


class Taker(Protocol):
    """Who takes what modules were given and what they gave."""

    def given(self, name: str, args: Any, kwargs: Any) -> None:
        """A module is about to run, one of those that may write what they are given."""

    def called(
        self, key: tuple[str, str], module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        """A module has ended."""


class Watcher(Protocol):
    """Who is told."""

    mutex: ForkSafeLock
    """Who has it may tell."""

    @property
    def running_whole(self) -> Taker | None:
        """Who is told of each module that ends while this thread calls the whole model."""

    def begins(self) -> None:
        """The whole model is called."""

    def ends(self) -> None:
        """It has ended, well or not."""

    def saw_given(self, name: str, args: Any, kwargs: Any) -> None:
        """A module is about to run, and nobody takes what it is given."""

    def saw_call(
        self, key: tuple[str, str], module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        """A module has ended, and nobody takes it."""

    def steps_now(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step."""

    def has_stepped(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""

    def updated(self, scale: Any) -> None:
        """A scaler of PyTorch's ends its iteration."""


class _Watched:
    """The forward hooks of one module."""

    def __init__(
        self, watcher: Watcher | None = None, name: str = "", is_whole: bool = False
    ) -> None:
        self._watcher = watcher
        self.is_whole = is_whole
        self._key = "output", name

    def __reduce__(self) -> tuple[Any, ...]:
        return _Watched, ()

    @_torch.runs_uncompiled
    def enter(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        watcher = self._watcher
        if torch.compiler.is_dynamo_compiling() or watcher is None or not _torch.is_real():
            return
        with watcher.mutex.lock:
            running = watcher.running_whole
            if running is None:
                unseen(watcher.saw_given, self._key[1], args, kwargs)
            else:
                running.given(self._key[1], args, kwargs)

    @_torch.runs_uncompiled
    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        watcher = self._watcher
        if torch.compiler.is_dynamo_compiling() or watcher is None or not _torch.is_real():
            return
        with watcher.mutex.lock:
            running = watcher.running_whole
            if running is None:
                unseen(watcher.saw_call, self._key, module, args, kwargs, output)
            else:
                running.called(self._key, module, args, kwargs, output)

    @_torch.runs_uncompiled
    def begin(self, _module: nn.Module, _args: Any) -> None:
        if (
            not torch.compiler.is_dynamo_compiling()
            and self._watcher is not None
            and _torch.is_real()
        ):
            unseen(self._watcher.begins)

    @_torch.runs_uncompiled
    def end(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if not torch.compiler.is_dynamo_compiling() and self._watcher is not None:
            unseen(self._watcher.ends)

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


class Optimizers:
    """Tells which optimizers have parameters of a model."""

    def __init__(self, model: weakref.ref[nn.Module]) -> None:
        self._model = model
        self._known = WeakIdKeyDictionary()  # not by what they equal: some are unhashable

    def __call__(self, optimizer: Optimizer) -> bool:
        """Whether one has."""
        model = self._model()
        if optimizer in self._known or model is None:
            return model is not None
        of_model = set(map(id, model.parameters()))
        if any(id(p) in of_model for group in optimizer.param_groups for p in group["params"]):
            self._known[optimizer] = True
            return True
        return False


class Installed:
    """Hooks that are there until `remove`."""

    def __init__(self, removes: list[Callable[[], None]]) -> None:
        self._removes = removes

    def remove(self) -> None:
        """Takes them off. Does nothing the second time."""
        while self._removes:
            self._removes.pop()()


def install(model: nn.Module, watcher: Watcher) -> Installed:
    """Puts hooks on each module of `model`, once, and on all optimizers."""
    removes: list[Callable[[], None]] = []
    asked = {id(m) for layer in _layers_asked_for_hooks(model) for m in layer.modules()}
    for name, module in name_of_each(model):
        hook = _Watched(watcher, name, module is model)
        if id(module) in asked:
            removes.append(_torch.on_call_without_hooks(module, hook.around))
        else:
            removes += [handle.remove for handle in _hooks_on(module, hook)]
    before, after = _telling(watcher, "steps_now"), _telling(watcher, "has_stepped")
    removes.append(on_optimizer_step(before=before, after=after))
    return Installed(removes)


def _layers_asked_for_hooks(model: nn.Module) -> list[nn.Module]:
    """Those that leave PyTorch's fast path if they, or modules in them, have hooks."""
    return [module for module in model.modules() if isinstance(module, nn.TransformerEncoderLayer)]


def _hooks_on(module: nn.Module, hook: _Watched) -> list[Any]:
    # Not `module.register...`: that of a scripted module refuses, though its hooks are called.
    handles = [nn.Module.register_forward_hook(module, hook.leave, with_kwargs=True)]
    if hook.is_whole:
        handles.append(nn.Module.register_forward_pre_hook(module, hook.begin))
        handles.append(nn.Module.register_forward_hook(module, hook.end, always_call=True))
    if may_write(module):
        handles.append(nn.Module.register_forward_pre_hook(module, hook.enter, with_kwargs=True))
    return handles


def may_write(module: nn.Module) -> bool:
    """Whether a module may write what it is given, itself or by what it calls: all but PyTorch's that call no other."""
    known = type(module).__module__.startswith("torch.nn.modules.")
    return (
        not known or bool(getattr(module, "inplace", False)) or any(True for _ in module.children())
    )


def follow(scaler: Any, watcher: Watcher) -> Callable[[], None]:
    """Hears of the updates of a scaler of PyTorch's, which tells nobody; what undoes that is returned."""
    if scaler is None or isinstance(scaler, GradScaler):
        return lambda: None
    plain_update, known = scaler.update, weakref.ref(watcher)

    def update(*args: Any, **kwargs: Any) -> Any:
        there = known()
        if there is not None:
            there.updated(_torch.scale_of(scaler))
        return plain_update(*args, **kwargs)

    def leave() -> None:
        if vars(scaler).get("update") is update:
            del scaler.update

    scaler.update = update
    return leave


def _telling(watcher: Watcher, method: str) -> Any:
    known = weakref.ref(watcher)  # hooks on optimizers are the process's, and must not keep a model

    def tell(optimizer: Optimizer) -> None:
        there = known()
        if there is not None:
            unseen(getattr(there, method), optimizer)

    return tell


def unseen(call: Callable[..., R], *args: Any) -> R:
    """Calls without the program's dispatch modes seeing what is computed: that is no part of it."""
    if not _torch.dispatch_modes():
        return call(*args)
    with _torch.without_dispatch():
        return call(*args)
