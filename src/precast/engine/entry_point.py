"""The Python kernel at the autocast key of an operation, which runs the kernel of the policy in force.

Invariants:

- the same kernel serves all policies: it looks up the thread's bound policy, else the installed one. Without either it
  calls PyTorch's kernel;
- if the native library is loaded, a compiled kernel is registered above this one. It calls this one in uncommon cases:
  watched, traced or transformed operations, and threads that are not registered in the library yet;
- while there is a watcher, it gets every operation. An annotation is a text for it, from the kernel of the call: made
  only then, after the operations inside, and read once in the same thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

from precast import _torch
from precast._torch import Kernel as DispatcherKernel
from precast.engine.operation import Operation
from precast.engine.thread_state import inherited_policy, installed, regions, thread_state

__all__ = ["Watcher", "annotate", "entry_point", "take_annotation", "watchers"]

Watcher = Callable[[Operation, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""A wrapper of kernels: called as ``watcher(op, run, args, kwargs)``, it returns the result of ``run()``."""

watchers: Final[list[Watcher]] = []
"""The watcher, if any; at most one."""


def entry_point(op: Operation, torch_kernel: DispatcherKernel) -> DispatcherKernel:
    """Return the kernel to register for `op`, above `torch_kernel`."""
    thread, everywhere = thread_state(op.device_type), installed(op.device_type)

    def kernel_in_force(keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bound = (
            thread.state.bound_policy or everywhere.bound_policy or inherited_policy(op.device_type)
        )
        kernel = None if bound is None else bound.kernels.get(op.name)
        if kernel is None:
            return torch_kernel(keyset, *args, **kwargs)
        return kernel(keyset, args, kwargs)

    def entry(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        regions.register_thread()
        if watchers:
            return watchers[0](op, lambda: kernel_in_force(keyset, args, kwargs), args, kwargs)
        return kernel_in_force(keyset, args, kwargs)

    _torch.never_compiled(kernel_in_force)
    return _torch.never_compiled(entry)


class _LastAnnotation(threading.local):
    text = ""


_last = _LastAnnotation()


def annotate(text: Callable[[], str]) -> None:
    """Record the result of `text`, about how a call ran and why, if there is a watcher."""
    if watchers:
        _last.text = text()


def take_annotation() -> str:
    """Return and clear this thread's annotation; empty if there is none."""
    text, _last.text = _last.text, ""
    return text
