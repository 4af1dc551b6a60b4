"""trace: which operation runs in which dtype and why, what the casts cost, and what to change.

Invariants:

- where no trace is open there is no hook, no mode, and no changed code in a kernel;
- a trace sees the thread that opened it, and PyTorch's own threads that work for that thread in backward;
- results, to the bit, and errors are the same as without a trace.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from precast import _torch
from precast._internal.display import size
from precast._internal.locks import survives_fork
from precast._torch.optimizer_hooks import on_optimizer_step
from precast.attachment.attachment import attached_models
from precast.diagnostics.failures import Failures
from precast.diagnostics.schema import Module, TraceData
from precast.diagnostics.tracing import call_sites
from precast.diagnostics.tracing.call_sites import Names
from precast.diagnostics.tracing.counting import Counter, Counts
from precast.diagnostics.tracing.explanation import Explanation
from precast.diagnostics.tracing.findings import findings_of
from precast.diagnostics.tracing.lineage import chain
from precast.diagnostics.tracing.mode import Listener, Mode
from precast.diagnostics.tracing.recorder import Recorder
from precast.diagnostics.tracing.saved import SavedTrace
from precast.engine import registration
from precast.engine.operation import Operation
from precast.engine.operator_kinds import dtype_of
from precast.errors import PrecastError
from precast.policy.module_plan import outwards
from precast.weights import held_gradients, weight_cache

__all__ = ["Trace", "listening", "trace"]


@_torch.never_compiled
def trace(model: nn.Module | None = None, *, full: bool = True) -> Trace:
    """Watches what runs inside ``with``: a row for each operation and place, with its rule and the reason.

    Args:
        model: the model whose module names the rows use. Without one, the names are those of attached models, or else
            they start with the class of the outermost module that runs.
        full: False counts how often each rule is carried out and the casts that it makes, and sees nothing else; it
            costs a few Python calls for each operation with a rule.

    Returns:
        The trace, for ``with``. It can be entered several times, and what it sees adds up.

    Raises:
        PrecastError: `model` is no module.

    Examples:
        >>> import precast
        >>> model = torch.nn.Linear(4, 2)
        >>> x = torch.ones(3, 4)
        >>> with precast.trace(model) as seen, precast.autocast("cpu"):
        ...     y = model(x)
        >>> [(row.op, row.rule, row.casts) for row in seen.rows]
        [('linear', 'lower', 3)]
    """
    if model is not None and not isinstance(model, nn.Module):
        raise PrecastError(
            f"trace(model) got {type(model).__name__}. It takes a torch.nn.Module, or nothing."
        )
    return Trace(model, full=full)


class Trace(SavedTrace):
    """What ran while the trace was open; `trace` makes one.

    Attributes:
        full: whether the trace sees every operation now, or only counts.
    """

    def __init__(self, model: nn.Module | None = None, *, full: bool = True) -> None:
        models = [] if model is None else [model]
        models += [attached for attached, _ in attached_models() if attached is not model]
        self.full = full
        self._counts = Counts()
        self._failures = Failures()
        self._recorder = Recorder(Names(models), self._counts, self._failures)
        self._counter = Counter(self._counts, self._failures)
        self._mode = Mode(self._recorder)
        self._watcher: Recorder | Counter = self._counter
        self._depth = 0
        self._thread = 0

    @_torch.never_compiled
    def __enter__(self) -> Trace:
        if self._depth and self._thread != threading.get_ident():
            raise PrecastError(
                "this trace is open in another thread. A trace belongs to one: make one there, with precast.trace()."
            )
        self._depth += 1
        if self._depth == 1:
            self._thread = threading.get_ident()
            _change_open(1)
            self._watch()
        return self

    @_torch.never_compiled
    def __exit__(self, *_error: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._stop_watching()
            _change_open(-1)

    def pause(self) -> None:
        """Only counts from here on, as with ``full=False``."""
        self._set_full(False)

    def resume(self) -> None:
        """Sees everything again from here on."""
        self._set_full(True)

    def explain(self, tensor: torch.Tensor) -> Explanation:
        """How a tensor came to have its dtype: the steps back to the rule, or to the tensor, that decided it.

        Args:
            tensor: any tensor that was made while the full trace was open.

        Raises:
            PrecastError: `tensor` is no tensor.
        """
        if not isinstance(tensor, torch.Tensor):
            raise PrecastError(
                f"trace.explain(tensor) got {type(tensor).__name__}. It takes a tensor."
            )
        return Explanation(dtype_of(tensor), chain(self._recorder.lineage.of(tensor)))

    @property
    def data(self) -> TraceData:
        """Everything seen so far, as plain values."""
        recorder, tally = self._recorder, self._recorder.tally
        rows = sorted(tally.rows.values(), key=lambda row: -row.seconds)
        called = {row.module for row in rows if row.module is not None}
        called |= {outer for name in called for outer in outwards(name)}
        types = recorder.names.types
        modules = [Module(name, kind) for name, kind in types.items() if name in called]
        return TraceData(
            rows,
            recorder.totals,
            list(tally.flow.values()),
            dict(recorder.saved),
            modules,
            tally.dropped,
            findings_of(rows, recorder.totals, recorder.facts, recorder.policies),
            list(self._counts.values()),
            self._notes(),
        )

    def _notes(self) -> list[str]:
        tally = self._recorder.tally
        notes = []
        if _torch.has_compiled():
            notes.append(
                "This process has functions of torch.compile. The trace does not see the operations that they fuse, "
                "nor the rules behind their casts; to see these, trace the functions uncompiled."
            )
        if any(row.device != "cpu" for row in tally.rows.values()):
            notes.append(
                "Times are the host's: for a device that works asynchronously, they are those of launching."
            )
        failures = self._failures
        if failures.total:
            notes.append(
                f"{size(failures.total, 'operation')} only ran and {'was' if failures.total == 1 else 'were'} counted, "
                f"as the trace failed to describe them: {failures.examples()}."
            )
        if tally.dropped:
            notes.append(
                f"{tally.dropped:,} calls have no row, as there were too many kinds of rows."
            )
        return notes

    def _set_full(self, full: bool) -> None:
        if self._depth and full != self.full:
            self._stop_watching()
            self.full = full
            self._watch()
        self.full = full

    def _watch(self) -> None:
        self._watcher = self._recorder if self.full else self._counter
        if self.full:
            self._recorder.start()
            self._mode.__enter__()  # type: ignore[no-untyped-call]
            _see_through(1)
        _here.watching = (*_here.watching, self._watcher)
        _torch.set_inherited_tls(_INHERITED, _here.watching)

    def _stop_watching(self) -> None:
        _here.watching = tuple(one for one in _here.watching if one is not self._watcher)
        _torch.set_inherited_tls(_INHERITED, _here.watching)
        if self._watcher is self._recorder:
            _see_through(-1)
            _torch.leave_mode(self._mode)


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Has a listener told of all operations of this thread inside ``with``, and of the rules that are carried out.

    Args:
        listener: what a trace's recorder is to a trace.
    """
    mode = Mode(listener)
    _change_open(1)
    before = _here.watching
    mode.__enter__()  # type: ignore[no-untyped-call]
    _see_through(1)
    _here.watching = (*before, listener)
    _torch.set_inherited_tls(_INHERITED, _here.watching)
    try:
        yield
    finally:
        _here.watching = before
        _torch.set_inherited_tls(_INHERITED, before)
        _see_through(-1)
        _torch.leave_mode(mode)
        _change_open(-1)


_Watcher = Recorder | Counter | Listener


class _Here(threading.local):
    """Who watches this thread, the outermost first."""

    watching: tuple[_Watcher, ...] = ()


_here: Final = _Here()
_INHERITED: Final = "precast traces"
# A thread that has this lock acquires those of the imported modules, so this one is created after them.
_lock: Final = survives_fork(threading.Lock())
_open = 0
_seeing = 0
_hooks: Final[list[Callable[[], None]]] = []
"""Ends the one listener to optimizers that all traces share."""


def _around_kernel(
    op: Operation,
    run: Callable[[], Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Runs around every kernel at an autocast key while a trace is open in the process."""
    watching = _here.watching or _torch.inherited_tls(_INHERITED) or ()
    if not watching or _torch.writes_graph():
        return run()
    guards = [one.failures.caller(args, kwargs) for one in watching]
    begun = [
        (one, guarded)
        for one, guarded in zip(watching, guards, strict=True)
        if guarded(op.name, _begin, one, op, args, kwargs)
    ]
    try:
        result = run()
    except BaseException as error:
        for one, guarded in reversed(begun):
            guarded(op.name, one.fail, error)
        raise
    for one, guarded in reversed(begun):
        guarded(op.name, one.end, result)
    return result


def _begin(watcher: _Watcher, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell a watcher that a rule is about to be carried out; it raises before it has changed anything."""
    watcher.begin(op, args, kwargs)
    return True


def _stepped(_optimizer: Optimizer) -> None:
    for one in _here.watching:
        if isinstance(one, Recorder):
            one.failures.call("step of an optimizer", one.stepped)


def _change_open(change: int) -> None:
    """Counts the open traces of the process: the first one changes the dispatcher, and the last one restores it."""
    global _open  # noqa: PLW0603 -- the dispatcher is one for the process
    with _lock:
        _open += change
        if change > 0:
            if _open == 1:
                registration.watch(_around_kernel)
                _hooks.append(on_optimizer_step(after=_stepped))
            call_sites.start_noting_regions(is_first=_open == 1)
        elif _open == 0:
            call_sites.stop_noting_regions()
            registration.unwatch()
            _hooks.pop()()


def _see_through(change: int) -> None:
    """Counts the modes of traces: the weight cache takes no notice of them."""
    global _seeing  # noqa: PLW0603
    with _lock:
        _seeing += change
        count, innermost = (
            (_torch.count_other_modes, _torch.innermost_other_mode)
            if _seeing
            else (_torch.dispatch_modes, _torch.innermost_dispatch_mode)
        )
        weight_cache.see_modes(count, innermost)
        held_gradients.see_modes(count)
