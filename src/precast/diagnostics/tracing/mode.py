"""The dispatch mode of a full trace: reports every operation, and the casts inside operations, to a listener.

Invariants:

- each operation gives the same bits and dtypes as without the mode. So an operation that calls others which autocast
  reaches, as all do in inference mode, is called with the mode and autocast on;
- this is done only for dense tensors, whose dispatch keys select the kernel; other tensors have keys of their own;
- no exception of the listener leaves the mode: it would end the process where C++ queries a subclass for its sizes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from time import perf_counter
from typing import Any, NamedTuple

from torch import Tensor

from precast import _torch
from precast.diagnostics.failures import Failures
from precast.engine.operation import Operation
from precast.engine.operator_kinds import Cast, Kind, kind_of

__all__ = ["OperationListener", "OperationMode"]


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


class _InnerCasts(threading.local):
    """The casts inside the operation of this thread that is called with the mode on, if there is one."""

    casts: list[Cast] | None = None
    depth: int = 0
    """The number of rules that were being applied around it."""


class OperationMode(_torch.ObservingMode):
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
            return _torch.redispatch_in_mode(self, func, opening.tensors, call, opening.casting)
        start = perf_counter()
        try:
            out, inside = self._run(func, call, opening)
        except Exception as error:
            guarded(func, self._listener.failed, func, call, error)
            raise
        seconds = perf_counter() - start
        guarded(func, self._report, func, call, out, seconds, inside)
        return out

    def _opening(self, kind: Kind, call: Any) -> _ModeCall | None:
        """Return the arguments for a call with the mode on, which shows the operations inside; None if not needed."""
        tensors = _tensors_in((*call[0], *call[1].values()))
        if not (kind.is_composite and tensors) and not kind.casts_inside(tensors, call):
            return None
        return (
            _ModeCall(tensors, self._listener.casting_here())
            if _can_open(kind, call[0], tensors)
            else None
        )

    def _run(self, func: Any, call: Any, opening: _ModeCall | None) -> tuple[Any, Any]:
        """Return the result of an operation, and the casts inside it."""
        if opening is None:
            return _torch.call_below_python(func, *call), ()
        inner = self._inner
        before = inner.casts, inner.depth
        inner.casts, inner.depth = [], self._listener.depth
        try:
            out = _torch.redispatch_in_mode(self, func, opening.tensors, call, opening.casting)
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


class _ModeCall(NamedTuple):
    """The arguments for a call with the mode on: tensors, and the device types on which autocast is on."""

    tensors: list[Tensor]
    casting: list[str]


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
