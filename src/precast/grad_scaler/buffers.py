"""Buffers of a model in skipped steps: restores their values from before the iteration.

A skipped step does not change parameters, but the forward pass has already written buffers: after an overflow in
float16, the running statistics of a batch norm are infinite, and stay so in all later iterations.

Invariants:
- a buffer is restored to its value before the first forward pass in training mode since the latest `update`;
- where only the device knows whether the step was skipped, nothing waits for it;
- graphs of `torch.compile` contain no part of this; a copy or a pickle of a guard guards nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from precast import _torch
from precast.errors import ScalerError
from precast.grad_scaler.memory import moved
from precast.policy.values import shown

__all__ = ["BufferGuard", "guarded"]


class _SavedBuffer(NamedTuple):
    """A buffer and a copy of its values."""

    buffer: Tensor
    version: int | None
    """None if writes do not increment a version counter."""
    values: Tensor


class BufferGuard:
    """Saves the buffers of modules once an iteration, and restores them after a skipped step."""

    def __init__(self, modules: Iterable[nn.Module] = ()) -> None:
        self._saved: dict[tuple[int, str], _SavedBuffer] = {}
        """By the index of the owner and the buffer's name."""
        self._owners: list[nn.Module] = []
        self._is_saved = False
        """True if a forward pass has started since the latest `update`."""
        self._guard(list(modules))

    def __reduce__(self) -> tuple[Any, ...]:
        return BufferGuard, ()

    @torch.no_grad()
    def end_iteration(self, skipped: bool | Tensor) -> None:
        """Restore the buffers if the iteration was skipped (a tensor: not 0), and save them for the next one."""
        if skipped is not False:
            for key, saved in self._saved.items():
                self._put_back(key, saved, skipped)
        self._is_saved = False
        self._save(all_of_them=True)

    def _guard(self, modules: list[nn.Module]) -> None:
        inner = {id(m): m for module in modules for m in module.modules()}
        self._owners = [module for module in inner.values() if _torch.own_buffers(module)]
        handles = []
        about_to_run, loaded = _calling(self._about_to_run), _calling(self._loaded)
        for module in inner.values():
            if any(True for _ in module.buffers()):
                # Not `module.register...`: a scripted module refuses that, though its hooks are called.
                handles.append(nn.Module.register_forward_pre_hook(module, about_to_run))
        handles += [nn.Module.register_load_state_dict_post_hook(m, loaded) for m in modules]
        for handle in handles:
            weakref.finalize(self, handle.remove).atexit = False
        self._save(all_of_them=True)

    def _about_to_run(self, module: nn.Module) -> None:
        if module.training and not self._is_saved:
            self._is_saved = True
            self._save(all_of_them=False)

    def _loaded(self, _module: nn.Module) -> None:
        self._save(all_of_them=True)

    @torch.no_grad()
    def _save(self, *, all_of_them: bool) -> None:
        """Save all buffers, or only those that were written since they were saved."""
        sources, copies = [], []
        for place, owner in enumerate(self._owners):
            for name, buffer in _torch.own_buffers(owner).items():
                if buffer is None or is_lazy(buffer):
                    continue
                saved, version = self._saved.get((place, name)), _torch.version_if_counted(buffer)
                if (
                    saved is None
                    or saved.buffer is not buffer
                    or saved.values.shape != buffer.shape
                ):
                    values = buffer.detach().clone()
                    self._saved[place, name] = _SavedBuffer(buffer, version, values)
                elif all_of_them or version is None or saved.version != version:
                    sources.append(buffer.detach())
                    copies.append(saved.values)
                    self._saved[place, name] = _SavedBuffer(buffer, version, saved.values)
        if sources:
            _torch.fused_copy(copies, sources)

    def _put_back(self, key: tuple[int, str], saved: _SavedBuffer, skipped: bool | Tensor) -> None:
        place, name = key
        owner = self._owners[place]
        if name not in _torch.own_buffers(owner):
            return
        current, values = _torch.own_buffers(owner)[name], saved.values
        if current is None or (current.shape, current.dtype) != (values.shape, values.dtype):
            if bool(skipped):
                _torch.own_buffers(owner)[name] = values.clone()
            return
        if isinstance(skipped, Tensor):
            values = torch.where(
                moved(skipped, current.device) != 0, moved(values, current.device), current
            )
        is_unwritten = current is saved.buffer and saved.version == _torch.version_if_counted(
            current
        )
        # Only writes through `.data` can be undone then: they do not increment the version counter either.
        (current.data if is_unwritten else current.detach()).copy_(values)


def guarded(modules: Any) -> BufferGuard:
    """Return a guard for a module, for several, or for none (None)."""
    several = [] if modules is None else [modules] if isinstance(modules, nn.Module) else modules
    checked: list[Any] = list(several) if isinstance(several, Iterable) else [several]
    wrong = [each for each in checked if not isinstance(each, nn.Module)]
    if wrong:
        raise ScalerError(
            f"restore_buffers takes a torch.nn.Module or a list of them; got {shown(wrong[0])}. Pass the model."
        )
    return BufferGuard(checked)


def _calling(method: Any) -> Any:
    """Return a hook that calls a method of a guard while the guard exists, outside of compiled code."""
    reference = weakref.WeakMethod(method)

    @_torch.runs_uncompiled
    def hook(module: nn.Module, _: object) -> None:
        callback = None if torch.compiler.is_dynamo_compiling() else reference()
        if callback is not None and _torch.is_real():
            callback(module)

    return hook
