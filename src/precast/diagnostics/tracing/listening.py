"""Listeners to operations: one mechanism for traces, for counting and for `tune`.

Invariants:

- without a listener there is no hook, no mode and no changed code in a kernel;
- a listener receives the operations of the thread that registered it, and of PyTorch's own threads that work for that
  thread in backward;
- each operation gives the same bits, dtypes and errors as without a listener. So an operation that calls others which
  autocast reaches, as all do in inference mode, is called with the dispatch mode and autocast on. This is done only for
  dense tensors, whose dispatch keys select the kernel; other tensors have keys of their own;
- no exception of a listener leaves its mode: it would end the process where C++ queries a subclass for its sizes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any, Final

from torch import Tensor
from torch.optim import Optimizer

from precast import _torch
from precast._internal.locks import make_fork_safe
from precast._torch.optimizer_hooks import on_optimizer_step
from precast.diagnostics.failures import Failures
from precast.diagnostics.tracing import call_sites
from precast.engine import registration
from precast.engine.operation import Operation
from precast.engine.operator_kinds import Cast, Kind, kind_of
from precast.engine.registration import leaves_autocast_on
from precast.engine.thread_state import thread_state
from precast.policy.policy import DEVICE_TYPES, Policy

__all__ = ["OperationListener", "casting_devices", "listen"]

_Opening = tuple[list[Tensor], Any, list[str]]
"""The tensors and the arguments of a call with the mode on, and the device types on which autocast is on."""


class OperationListener:
    """Base class of listeners to operations, and to the rules that are applied to them. The methods here do nothing.

    `begin` and `end`, or `begin` and `fail`, are called around each operation that has a kernel at an autocast key;
    `saw` or `failed` after each operation below it. So `saw` for casts of a rule comes between `begin` and `end`.
    """

    failures: Failures
    """Counts the exceptions of this listener, which never reach the program."""

    @property
    def depth(self) -> int:
        """The number of rules that are being applied."""
        return 0

    def begin(self, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Handle the start of an operation that has a kernel at an autocast key."""

    def end(self, result: Any) -> None:
        """Handle the end of that operation."""

    def fail(self, error: BaseException) -> None:
        """Handle an error of that operation."""

    def casting_here(self) -> list[str]:
        """Return the device types on which autocast casts the arguments of the current operation."""
        return []

    def saw(self, func: Any, call: Any, out: Any, seconds: float, inside: Sequence[Cast]) -> None:
        """Handle an operation that has run; `inside` are the casts in operations that it called."""

    def failed(self, func: Any, call: Any, error: BaseException) -> None:
        """Handle an operation that has raised an error."""

    def stepped(self) -> None:
        """Handle the end of an optimizer's step."""


def casting_devices(applied: tuple[Operation, Policy, str | None] | None = None) -> list[str]:
    """Return the device types on which autocast casts now: none inside most operations that have a rule.

    Args:
        applied: the operation whose rule is being applied, its policy and the rule; None outside of these.
    """
    if applied is not None:
        op, policy, rule = applied
        is_rerun = thread_state(op.device_type).state.reruns > 0
        if rule is not None and (is_rerun or not leaves_autocast_on(policy, op, rule)):
            return []
    return [device for device in DEVICE_TYPES if call_sites.is_enabled(device)]


class _ThreadListeners(threading.local):
    """The listeners of this thread, the outermost first."""

    listeners: tuple[OperationListener, ...] = ()


_thread: Final = _ThreadListeners()
_INHERITED: Final = "precast traces"
# A thread that has this lock acquires those of the imported modules, so this one is created after them.
_lock: Final = make_fork_safe(threading.Lock())
_listener_count = 0
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
    mode = None if rules_only else _OperationMode(listener)
    _count_listeners(1)
    if mode is not None:
        mode.__enter__()  # type: ignore[no-untyped-call]
    _set_listeners((*_thread.listeners, listener))
    try:
        yield
    finally:
        _set_listeners(tuple(each for each in _thread.listeners if each is not listener))
        if mode is not None:
            _torch.leave_mode(mode)
        _count_listeners(-1)


def _set_listeners(listeners: tuple[OperationListener, ...]) -> None:
    _thread.listeners = listeners
    _torch.set_inherited_tls(_INHERITED, listeners)


def _around_kernel(
    op: Operation, run: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
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


# --- the dispatch mode of a listener to all operations ---


class _InnerCasts(threading.local):
    """The casts inside the operation of this thread that is called with the mode on, if there is one."""

    casts: list[Cast] | None = None
    depth: int = 0
    """The number of rules that were being applied around it."""


class _OperationMode(_torch.ObservingMode):
    """Reports every operation that runs to a listener."""

    def __init__(self, listener: OperationListener) -> None:
        super().__init__()
        self._listener = listener
        self._inner = _InnerCasts()

    @_torch.runs_uncompiled
    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = args, kwargs or {}
        guarded = self._listener.failures.caller(*call)
        kind = None if _torch.runs_on_fake_tensors() else guarded(func, kind_of, func)
        if kind is None or not kind.is_operation:
            return _torch.call_below_python(func, *call)
        opening = guarded(func, self._opening, kind, call)
        if opening is not None and kind.is_composite:
            return _torch.redispatch_in_mode(self, func, *opening)
        start = perf_counter()
        try:
            out, inside = self._run(func, call, opening)
        except Exception as error:
            guarded(func, self._listener.failed, func, call, error)
            raise
        seconds = perf_counter() - start
        guarded(func, self._report, func, call, out, seconds, inside)
        return out

    def _opening(self, kind: Kind, call: Any) -> _Opening | None:
        """Return the arguments for a call with the mode on, which shows the operations inside; None if not needed."""
        tensors = _tensors_in((*call[0], *call[1].values()))
        if not (kind.is_composite and tensors) and not kind.casts_inside(tensors, call):
            return None
        if not _can_open(kind, call[0], tensors):
            return None
        return tensors, call, self._listener.casting_here()

    def _run(self, func: Any, call: Any, opening: _Opening | None) -> tuple[Any, Any]:
        """Return the result of an operation, and the casts inside it."""
        if opening is None:
            return _torch.call_below_python(func, *call), ()
        inner = self._inner
        before = inner.casts, inner.depth
        inner.casts, inner.depth = [], self._listener.depth
        try:
            out = _torch.redispatch_in_mode(self, func, *opening)
            return out, inner.casts
        finally:
            inner.casts, inner.depth = before

    def _report(
        self, func: Any, call: Any, out: Any, seconds: float, inside: Sequence[Cast]
    ) -> None:
        inner = self._inner
        if inner.casts is not None and self._listener.depth == inner.depth:
            inner.casts += [*inside, *kind_of(func).casts(call[0], out, seconds)]
        else:
            self._listener.saw(func, call, out, seconds, inside)


def _tensors_in(values: Any) -> list[Tensor]:
    tensors = [value for value in values if isinstance(value, Tensor)]
    for value in values:
        if isinstance(value, list | tuple):
            tensors += (item for item in value if isinstance(item, Tensor))
    return tensors


def _can_open(kind: Kind, args: tuple[Any, ...], tensors: list[Tensor]) -> bool:
    """Return True if the mode can see the operations inside; another mode around would miss the operation."""
    is_usual = not _torch.dispatch_modes() and kind.can_open(args)
    return is_usual and all(
        _torch.is_plain(type(tensor)) and _torch.has_dense_keys(tensor) for tensor in tensors
    )
