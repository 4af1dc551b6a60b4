"""The hooks of a monitor: on each module of a model, on all optimizers, and on a scaler of PyTorch's.

Invariants:
- a copy of a model, by `deepcopy` or pickle, is not watched: its hooks do nothing;
- what `torch.compile` or `torch.export` traces has none of this in it: of a compiled part, outputs and gradients are
  seen where it ends;
- after `remove` nothing is left on the model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from precast import _torch
from precast.health.turns import Turn
from precast.scaling.base import Scale

__all__ = ["Installed", "Watcher", "follow", "install", "names_in", "plain_name", "unseen"]


R = TypeVar("R")


class Taker(Protocol):
    """Who takes what modules were given and what they gave."""

    def called(
        self, key: tuple[str, str], module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        """A module has ended."""


class Watcher(Protocol):
    """Who is told."""

    turn: Turn
    """Who has it may tell."""

    @property
    def running_whole(self) -> Taker | None:
        """Who is told of each module that ends while this thread calls the whole model."""

    def begins(self) -> None:
        """The whole model is called."""

    def ends(self) -> None:
        """It has ended, well or not."""

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

    def __init__(self, watcher: Watcher | None = None, name: str = "") -> None:
        self._watcher = watcher
        self._key = "output", name

    def __reduce__(self) -> tuple[Any, ...]:
        return _Watched, ()

    @_torch.runs_uncompiled
    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        watcher = self._watcher
        if torch.compiler.is_dynamo_compiling() or watcher is None or not _torch.is_real():
            return
        with watcher.turn.lock:
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


class Installed:
    """Hooks that are there until `remove`."""

    def __init__(self, handles: list[Any]) -> None:
        self._handles = handles

    def remove(self) -> None:
        """Takes them off. Does nothing the second time."""
        while self._handles:
            self._handles.pop().remove()


def install(model: nn.Module, watcher: Watcher) -> Installed:
    """Puts hooks on each module of `model`, once, and on all optimizers."""
    handles = []
    for name, module in model.named_modules():
        hook = _Watched(watcher, plain_name(name))
        # Not `module.register...`: that of a scripted module refuses, though its hooks are called.
        handles.append(nn.Module.register_forward_hook(module, hook.leave, with_kwargs=True))
        if module is model:
            handles.append(nn.Module.register_forward_pre_hook(module, hook.begin))
            handles.append(nn.Module.register_forward_hook(module, hook.end, always_call=True))
    handles.append(register_optimizer_step_pre_hook(_telling(watcher, "steps_now")))
    handles.append(register_optimizer_step_post_hook(_telling(watcher, "has_stepped")))
    return Installed(handles)


def follow(scaler: Any, watcher: Watcher) -> Callable[[], None]:
    """Hears of the updates of a scaler of PyTorch's, which tells nobody; what undoes that is returned."""
    if scaler is None or isinstance(scaler, Scale):
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

    def tell(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        there = known()
        if there is not None:
            unseen(getattr(there, method), optimizer)

    return tell


def unseen(call: Callable[..., R], *args: Any) -> R:
    """Calls without the program's dispatch modes seeing what is computed: that is no part of it."""
    if not _torch.dispatch_modes():
        return call(*args)
    with _torch.undispatched():
        return call(*args)


def plain_name(name: str) -> str:
    """A module's or parameter's name without what DistributedDataParallel and `torch.compile` put into it."""
    parts = _parts(name)
    return ".".join(parts)


def names_in(model: nn.Module, parameters: Iterable[Tensor]) -> dict[int, str]:
    """``id`` of each of `parameters` that is one of `model`'s -> its name there."""
    wanted = set(map(id, parameters))
    return {id(p): plain_name(name) for name, p in model.named_parameters() if id(p) in wanted}


def _parts(name: str) -> Iterator[str]:
    return (part for place, part in enumerate(name.split(".")) if not _is_wrapper(place, part))


def _is_wrapper(place: int, part: str) -> bool:
    return part in {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"} or (
        part == "module" and place == 0
    )
