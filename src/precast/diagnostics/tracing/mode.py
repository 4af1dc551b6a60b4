"""The dispatch mode of a full trace: tells a recorder of every operation, and of the casts inside operations.

Invariants: each operation computes what it computes without the mode, to the bit and in dtype. So an operation that
calls others where autocast reaches them, as all do in inference mode, is called with the mode and autocast on.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from time import perf_counter
from typing import Any, Protocol

from torch import Tensor

from precast import _torch
from precast.engine.operation import Operation
from precast.engine.operator_kinds import Cast, Kind, kind_of

__all__ = ["Listener", "Mode"]


class Listener(Protocol):
    """Who is told of operations, and of the rules that are carried out around them."""

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
        if _torch.writes_graph():
            return func(*args, **call[1])
        kind = kind_of(func)
        tensors = _tensors_in((*args, *call[1].values()))
        if kind.is_composite and tensors and _can_open(kind, args, tensors):
            return _torch.redispatch_in_mode(
                self, func, tensors, call, self._recorder.casting_here()
            )
        start = perf_counter()
        try:
            out, inside = self._run(kind, func, tensors, call)
        except Exception as error:
            self._recorder.failed(func, call, error)
            raise
        seconds = perf_counter() - start
        here = self._here
        if here.casts is not None and self._recorder.depth == here.depth:
            here.casts += [*inside, *kind.casts(args, out, seconds)]
        else:
            self._recorder.saw(func, call, out, seconds, inside)
        return out

    def _run(self, kind: Kind, func: Any, tensors: list[Tensor], call: Any) -> tuple[Any, Any]:
        """The result of an operation, and the casts inside it."""
        if not (kind.casts_inside(tensors, call) and _can_open(kind, call[0], tensors)):
            return func(*call[0], **call[1]), ()
        here, recorder = self._here, self._recorder
        before = here.casts, here.depth
        here.casts, here.depth = [], recorder.depth
        try:
            out = _torch.redispatch_in_mode(self, func, tensors, call, recorder.casting_here())
            return out, here.casts
        finally:
            here.casts, here.depth = before


def _tensors_in(values: Any) -> list[Tensor]:
    found = [value for value in values if isinstance(value, Tensor)]
    for value in values:
        if isinstance(value, list | tuple):
            found += (item for item in value if isinstance(item, Tensor))
    return found


def _can_open(kind: Kind, args: tuple[Any, ...], tensors: list[Tensor]) -> bool:
    """Whether what an operation calls can be seen; another mode around would not be told of the operation."""
    is_usual = all(
        _torch.is_plain(type(tensor))
        and not (tensor.is_nested or tensor.is_meta or _torch.is_functorch_wrapper(tensor))
        for tensor in tensors
    )
    return is_usual and not _torch.dispatch_modes() and kind.can_open(args)
