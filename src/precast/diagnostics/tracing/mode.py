"""The dispatch mode of a full trace: tells a recorder of every operation, and of the casts inside operations.

Invariants:

- each operation computes what it computes without the mode, to the bit and in dtype. So an operation that calls others
  where autocast reaches them, as all do in inference mode, is called with the mode and autocast on;
- that is done for dense tensors alone, as their dispatch keys choose the kernel: others have keys of their own;
- no exception of the recorder leaves the mode. Where C++ asks a subclass for its sizes, one would end the process.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from time import perf_counter
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from precast import _torch
from precast.diagnostics.failures import Failures
from precast.engine.operation import Operation
from precast.engine.operator_kinds import Cast, Kind, kind_of

__all__ = ["Listener", "Mode"]


class Listener(Protocol):
    """Who is told of operations, and of the rules that are carried out around them."""

    failures: Failures
    """Counts the exceptions of this listener."""

    @property
    def depth(self) -> int:
        """How many rules are being carried out."""

    def begin(self, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A rule is about to be carried out."""

    def end(self, result: Any) -> None:
        """It has been carried out."""

    def fail(self, error: BaseException) -> None:
        """It has raised."""

    def casting_here(self) -> list[str]:
        """Device types on which autocast casts what runs now."""

    def saw(self, func: Any, call: Any, out: Any, seconds: float, inside: Sequence[Cast]) -> None:
        """An operation has run; `inside` are the casts in the operations that it called."""

    def failed(self, func: Any, call: Any, error: BaseException) -> None:
        """An operation has raised."""


class _Here(threading.local):
    """The operation of this thread that is called so that the casts inside it are seen, if there is one."""

    casts: list[Cast] | None = None
    depth: int = 0
    """How many rules were being carried out around it."""


class Mode(_torch.ObservingMode):
    """Tells a recorder of every operation that runs."""

    def __init__(self, recorder: Listener) -> None:
        super().__init__()
        self._recorder = recorder
        self._here = _Here()

    @_torch.runs_uncompiled
    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = args, kwargs or {}
        guarded = self._recorder.failures.caller(*call)
        kind = None if _torch.writes_graph() else guarded(func, kind_of, func)
        if kind is None or not kind.is_operation:
            return _torch.call_below_python(func, *call)
        opening = guarded(func, self._opening, kind, call)
        if opening is not None and kind.is_composite:
            return _torch.redispatch_in_mode(self, func, opening.tensors, call, opening.casting)
        start = perf_counter()
        try:
            out, inside = self._run(func, call, opening)
        except Exception as error:
            guarded(func, self._recorder.failed, func, call, error)
            raise
        seconds = perf_counter() - start
        guarded(func, self._report, func, call, out, seconds, inside)
        return out

    def _opening(self, kind: Kind, call: Any) -> _Opening | None:
        """Return how to call an operation so that the mode sees the operations in it; None where that is not needed."""
        tensors = _tensors_in((*call[0], *call[1].values()))
        if not (kind.is_composite and tensors) and not kind.casts_inside(tensors, call):
            return None
        return (
            _Opening(tensors, self._recorder.casting_here())
            if _can_open(kind, call[0], tensors)
            else None
        )

    def _run(self, func: Any, call: Any, opening: _Opening | None) -> tuple[Any, Any]:
        """Return the result of an operation, and the casts inside it."""
        if opening is None:
            return _torch.call_below_python(func, *call), ()
        here = self._here
        before = here.casts, here.depth
        here.casts, here.depth = [], self._recorder.depth
        try:
            out = _torch.redispatch_in_mode(self, func, opening.tensors, call, opening.casting)
            return out, here.casts
        finally:
            here.casts, here.depth = before

    def _report(
        self, func: Any, call: Any, out: Any, seconds: float, inside: Sequence[Cast]
    ) -> None:
        here = self._here
        if here.casts is not None and self._recorder.depth == here.depth:
            here.casts += [*inside, *kind_of(func).casts(call[0], out, seconds)]
        else:
            self._recorder.saw(func, call, out, seconds, inside)


class _Opening(NamedTuple):
    """How to call an operation with the mode on: its tensors, and the device types on which autocast is on."""

    tensors: list[Tensor]
    casting: list[str]


def _tensors_in(values: Any) -> list[Tensor]:
    tensors = [value for value in values if isinstance(value, Tensor)]
    for value in values:
        if isinstance(value, list | tuple):
            tensors += (item for item in value if isinstance(item, Tensor))
    return tensors


def _can_open(kind: Kind, args: tuple[Any, ...], tensors: list[Tensor]) -> bool:
    """Return whether the mode can see the operations in an operation; another mode around would miss the operation."""
    is_usual = not _torch.dispatch_modes() and kind.can_open(args)
    return is_usual and all(
        _torch.is_plain(type(tensor)) and _torch.has_dense_keys(tensor) for tensor in tensors
    )
