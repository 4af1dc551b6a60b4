"""The Python kernel at the autocast key of an operation: it finds the policy in force, and runs what that says.

Invariants:

- the kernel is the same for all policies: it looks up the thread's bound policy, or else the installed one, and without
  one calls PyTorch's kernel;
- where the library of compiled kernels is loaded, one of those stands above it and calls it for what is not common:
  what is watched, traced or transformed, and threads that the library does not know yet;
- while somebody watches, every operation is handed to the watcher.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from precast import _torch
from precast._torch import Kernel as DispatcherKernel
from precast.engine.operation import Operation
from precast.engine.thread_state import inherited_policy, installed, regions, thread_state

__all__ = ["Watcher", "entry_point", "watchers"]

Watcher = Callable[[Operation, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""What stands around a kernel: called as ``watcher(op, run, args, kwargs)``, it gives what ``run()`` gives."""

watchers: Final[list[Watcher]] = []
"""Who watches: nobody, or one."""


def entry_point(op: Operation, native_kernel: DispatcherKernel) -> DispatcherKernel:
    """The kernel to be registered for `op`.

    Args:
        op: the operation.
        native_kernel: what was there before.
    """
    thread, everywhere = thread_state(op.device_type), installed(op.device_type)

    def kernel_in_force(keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bound = (
            thread.state.bound_policy or everywhere.bound_policy or inherited_policy(op.device_type)
        )
        kernel = None if bound is None else bound.kernels.get(op.name)
        if kernel is None:
            return native_kernel(keyset, *args, **kwargs)
        return kernel(keyset, args, kwargs)

    def entry(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        regions.introduce()
        if watchers:
            return watchers[0](op, lambda: kernel_in_force(keyset, args, kwargs), args, kwargs)
        return kernel_in_force(keyset, args, kwargs)

    _torch.never_compiled(kernel_in_force)
    return _torch.never_compiled(entry)
