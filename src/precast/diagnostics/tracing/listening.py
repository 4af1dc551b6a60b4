"""Registration of listeners to operations: one mechanism for traces, for counting and for `tune`.

Invariants:

- without a listener there is no hook, no mode and no changed code in a kernel;
- a listener receives the operations of the thread that registered it, and of PyTorch's own threads that work for that
  thread in backward;
- results, to the bit, and errors are the same as without a listener.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

from torch.optim import Optimizer

from precast import _torch
from precast._internal.locks import survives_fork
from precast._torch.optimizer_hooks import on_optimizer_step
from precast.diagnostics.tracing import call_sites
from precast.diagnostics.tracing.mode import OperationListener, OperationMode
from precast.engine import registration
from precast.engine.operation import Operation
from precast.weights import held_gradients, weight_cache

__all__ = ["listen"]


class _ThreadListeners(threading.local):
    """The listeners of this thread, the outermost first."""

    listeners: tuple[OperationListener, ...] = ()


_thread: Final = _ThreadListeners()
_INHERITED: Final = "precast traces"
# A thread that has this lock acquires those of the imported modules, so this one is created after them.
_lock: Final = survives_fork(threading.Lock())
_listener_count = 0
_mode_count = 0
_hooks: Final[list[Callable[[], None]]] = []
"""Removes the one hook on optimizers that all listeners share."""


@contextlib.contextmanager
def listen(listener: OperationListener, *, rules_only: bool = False) -> Iterator[None]:
    """Report the operations of this thread inside ``with`` to a listener.

    Args:
        listener: receives each call of an operation.
        rules_only: report only operations that have a kernel at an autocast key, by `begin`, `end` and `fail`. This
            needs no dispatch mode and costs a few Python calls for each of them.
    """
    mode = None if rules_only else OperationMode(listener)
    _count_listeners(1)
    if mode is not None:
        mode.__enter__()  # type: ignore[no-untyped-call]
        _count_modes(1)
    _set_listeners((*_thread.listeners, listener))
    try:
        yield
    finally:
        _set_listeners(tuple(each for each in _thread.listeners if each is not listener))
        if mode is not None:
            _count_modes(-1)
            _torch.leave_mode(mode)
        _count_listeners(-1)


def _set_listeners(listeners: tuple[OperationListener, ...]) -> None:
    _thread.listeners = listeners
    _torch.set_inherited_tls(_INHERITED, listeners)


def _around_kernel(
    op: Operation,
    run: Callable[[], Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run a kernel at an autocast key, and report it to the listeners of the thread."""
    listeners = _thread.listeners or _torch.inherited_tls(_INHERITED) or ()
    if not listeners or _torch.runs_on_fake_tensors():
        return run()
    guards = [each.failures.caller(args, kwargs) for each in listeners]
    started = [
        (each, guarded)
        for each, guarded in zip(listeners, guards, strict=True)
        if guarded(op.name, _begin, each, op, args, kwargs)
    ]
    try:
        result = run()
    except BaseException as error:
        for each, guarded in reversed(started):
            guarded(op.name, each.fail, error)
        raise
    for each, guarded in reversed(started):
        guarded(op.name, each.end, result)
    return result


def _begin(
    listener: OperationListener, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Report a rule that is about to be applied. Returns True, because a failure is reported as None."""
    listener.begin(op, args, kwargs)
    return True


def _after_step(_optimizer: Optimizer) -> None:
    for each in _thread.listeners:
        each.failures.call("step of an optimizer", each.stepped)


def _count_listeners(change: int) -> None:
    """Count the listeners of the process: the first one changes the dispatcher, and the last one restores it."""
    global _listener_count  # noqa: PLW0603 -- the dispatcher is one for the process
    with _lock:
        _listener_count += change
        if change > 0:
            if _listener_count == 1:
                registration.watch(_around_kernel)
                _hooks.append(on_optimizer_step(after=_after_step))
            call_sites.start_recording_regions(is_first=_listener_count == 1)
        elif _listener_count == 0:
            call_sites.stop_recording_regions()
            registration.unwatch()
            _hooks.pop()()


def _count_modes(change: int) -> None:
    """Count the modes of listeners: the weight cache ignores them."""
    global _mode_count  # noqa: PLW0603
    with _lock:
        _mode_count += change
        count, innermost = (
            (_torch.count_other_modes, _torch.innermost_other_mode)
            if _mode_count
            else (_torch.dispatch_modes, _torch.innermost_dispatch_mode)
        )
        weight_cache.set_mode_functions(count, innermost)
        held_gradients.set_mode_counter(count)
