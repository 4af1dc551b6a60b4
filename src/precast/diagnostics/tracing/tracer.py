"""trace: which operation runs in which dtype and why, what the casts cost, and what to change.

Invariants:

- where there is no trace there is nothing of it: no hook, no mode, no other code in a kernel;
- a trace sees the thread that opened it, and PyTorch's own threads that work for that one in backward;
- results, to the bit, and errors are what they are without it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from precast import _torch
from precast._torch.optimizer_hooks import on_optimizer_step
from precast.attachment.attachment import attached_models
from precast.diagnostics.schema import Module, Row, TraceData
from precast.diagnostics.tracing import call_sites
from precast.diagnostics.tracing.call_sites import Names
from precast.diagnostics.tracing.counting import Counter, Counts
from precast.diagnostics.tracing.explanation import Explanation
from precast.diagnostics.tracing.findings import findings_of
from precast.diagnostics.tracing.lineage import chain
from precast.diagnostics.tracing.mode import Mode
from precast.diagnostics.tracing.recorder import Recorder
from precast.diagnostics.tracing.saved import SavedTrace
from precast.engine import registration
from precast.engine.operation import Operation
from precast.errors import PrecastError
from precast.weights import held_gradients, weight_cache

__all__ = ["Trace", "trace"]


@_torch.never_compiled
def trace(model: nn.Module | None = None, *, full: bool = True) -> Trace:
    """Watches what runs inside ``with``: a row for each operation and place, with its rule and the reason.

    Args:
        model: the model whose names the rows say. Without one: those of attached models, or else the class of the
            outermost module that runs.
        full: False counts how often each rule is carried out, and the casts that it makes, and sees no more; it costs
            a few calls in Python for each operation with a rule.

    Returns:
        The trace, to be entered by ``with``, as often as one likes: what it sees adds up.

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
    """What was seen while it was open; `trace` makes one.

    Attributes:
        full: whether it sees every operation now, or counts.
    """

    def __init__(self, model: nn.Module | None = None, *, full: bool = True) -> None:
        models = [] if model is None else [model]
        models += [attached for attached, _ in attached_models() if attached is not model]
        self.full = full
        self._names = Names(models)
        self._counts = Counts()
        self._recorder = Recorder(self._names, self._counts)
        self._counter = Counter(self._counts)
        self._mode = Mode(self._recorder)
        self._depth = 0
        self._thread = 0
        self._is_seeing = False

    @_torch.never_compiled
    def __enter__(self) -> Trace:
        if self._depth and self._thread != threading.get_ident():
            raise PrecastError(
                "this trace is open in another thread. A trace belongs to one: make one there, with precast.trace()."
            )
        self._depth += 1
        if self._depth == 1:
            self._thread = threading.get_ident()
            _watch()
            self._go_on()
        return self

    @_torch.never_compiled
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._rest()
            _unwatch()

    def pause(self) -> None:
        """From here on only counts, as with ``full=False``."""
        self._change(full=False)

    def resume(self) -> None:
        """From here on sees everything again."""
        self._change(full=True)

    def explain(self, tensor: torch.Tensor) -> Explanation:
        """How a tensor came to have its dtype: back to the rule, or the tensor, that decided it.

        Args:
            tensor: any that was made while the full trace was open, and is still there.

        Raises:
            PrecastError: it is no tensor.
        """
        if not isinstance(tensor, torch.Tensor):
            raise PrecastError(
                f"trace.explain(tensor) got {type(tensor).__name__}. It takes a tensor."
            )
        dtype = str(tensor.dtype).removeprefix("torch.")
        return Explanation(dtype, chain(self._recorder.lineage.of(tensor)))

    @property
    def data(self) -> TraceData:
        """All of it as plain values, as it is now."""
        recorder, tally = self._recorder, self._recorder.tally
        rows = sorted(tally.rows.values(), key=_by_time)
        types = self._names.types
        called = {row.module for row in rows if row.module is not None}
        modules = [Module(name, types.get(name, "")) for name in _with_parents(called, types)]
        return TraceData(
            rows,
            recorder.totals,
            list(tally.flow.values()),
            dict(recorder.saved),
            modules,
            tally.dropped,
            findings_of(rows, recorder.totals, recorder.facts, recorder.policies),
            list(self._counts.by_rule.values()),
            self._notes(),
        )

    def _notes(self) -> list[str]:
        tally = self._recorder.tally
        notes = []
        if _torch.has_compiled():
            notes.append(
                "This process has functions of torch.compile: of what they fuse a trace sees nothing, and of the casts "
                "in them no rule. To see their operations, trace them uncompiled."
            )
        if any(row.device != "cpu" for row in tally.rows.values()):
            notes.append(
                "Times are the host's: on a device that works on its own, those of launching."
            )
        if tally.dropped:
            notes.append(
                f"{tally.dropped:,} calls have no row, as there were too many kinds of rows."
            )
        return notes

    def _change(self, *, full: bool) -> None:
        if full == self.full:
            return
        if self._depth:
            self._rest()
        self.full = full
        if self._depth:
            self._go_on()

    def _go_on(self) -> None:
        self._is_seeing = self.full
        if self.full:
            self._recorder.start()
            _torch.enter_mode(self._mode)
            _see_through(1)
        _here.watching = (*_here.watching, self._recorder if self.full else self._counter)
        _torch.set_inherited_tls(_LENT, _here.watching)

    def _rest(self) -> None:
        mine = self._recorder if self._is_seeing else self._counter
        _here.watching = tuple(one for one in _here.watching if one is not mine)
        _torch.set_inherited_tls(_LENT, _here.watching)
        if self._is_seeing:
            _see_through(-1)
            _torch.leave_mode(self._mode)


class _Here(threading.local):
    """Who watches this thread, the outermost first."""

    watching: tuple[Recorder | Counter, ...] = ()


_here: Final = _Here()
_LENT: Final = "precast traces"
_lock: Final = threading.Lock()
_open = 0
_seeing = 0


def _watcher(
    op: Operation,
    plain: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    skip: int,
) -> Any:
    """Stands around every kernel at an autocast key while there is a trace in the process."""
    watching = _here.watching or _torch.inherited_tls(_LENT) or ()
    if not watching or _torch.writes_graph():
        return plain(*args, **kwargs)
    own = args[skip:] if skip else args
    for one in watching:
        one.begin(op, own, kwargs)
    try:
        result = plain(*args, **kwargs)
    except BaseException as error:
        for one in reversed(watching):
            one.fail(error)
        raise
    for one in reversed(watching):
        one.end(result)
    return result


def _stepped(_optimizer: Optimizer) -> None:
    for one in _here.watching:
        if isinstance(one, Recorder):
            one.stepped()


# One listener for all traces.
_hooks: Final[list[Callable[[], None]]] = []


def _watch() -> None:
    global _open  # noqa: PLW0603 -- the dispatcher is one for the process
    with _lock:
        _open += 1
        if _open == 1:
            registration.watch(_watcher)
            _hooks.append(on_optimizer_step(after=_stepped))
    call_sites.watch_regions()


def _unwatch() -> None:
    global _open  # noqa: PLW0603
    call_sites.stop_watching_regions()
    with _lock:
        _open -= 1
        if _open == 0:
            registration.unwatch()
            _hooks.pop()()


def _see_through(change: int) -> None:
    """Has the weight cache take no notice of the traces' modes, while there are any."""
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


def _by_time(row: Row) -> float:
    return -row.seconds


def _with_parents(called: set[str], types: dict[str, str]) -> list[str]:
    """The modules that have rows, and those around them, in the order of the model."""
    around = {
        ".".join(parts[:n])
        for parts in (name.split(".") for name in called)
        for n in range(len(parts))
    }
    return [name for name in types if name in called | around]
