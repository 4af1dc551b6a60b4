"""Tells of each operation that a site is: who runs it, on which tensors, and what it gives.

Invariants:

- an operation inside one that has an autocast kernel belongs to that one, as a rule acts on it;
- what backward runs is not told, but for what a checkpoint runs again;
- a module's name is the first of its names; modules that are none of the model's do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from types import FrameType
from typing import Any, Final, NamedTuple

from torch import nn

from precast import _torch
from precast.diagnostics.failures import Failures
from precast.diagnostics.tracing.call_sites import frame_above
from precast.engine.operation import Operation
from precast.engine.operator_kinds import Cast, kind_of
from precast.policy.module_names import modules_by_name, name_of_each
from precast.policy.module_plan import is_called, outwards
from precast.policy.rows import short, split

__all__ = ["Happening", "Listener", "Owners", "bare_name"]


class Happening(NamedTuple):
    """One call of an operation.

    Attributes:
        module: the name of the module that runs it; None where no module of the model does.
        overload: the dispatcher's name, such as `aten::softmax.int`.
        args: the positional arguments.
        kwargs: the keyword arguments.
        is_pinned: whether rules for modules around may not reach it.
        is_again: whether a checkpoint runs it again.
        is_view: whether its results are its arguments' numbers.
    """

    module: str | None
    overload: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_pinned: bool
    is_again: bool
    is_view: bool = False


def bare_name(overload: str) -> str:
    """An operation as a policy's row has it: `aten::softmax.int` -> `softmax`."""
    return short(split(overload)[0])


class Owners:
    """Which module of a model runs what is on the stack."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        named = modules_by_name(model)
        self.names: Final = tuple(named)
        self._first = {id(module): name for name, module in name_of_each(model)}
        count: dict[int, int] = {}
        for module in named.values():
            count[id(module)] = count.get(id(module), 0) + 1
        self._with_two_names = {key for key, names in count.items() if names > 1}
        self._around = {
            name: [n for n in outwards(name) if n in named and is_called(named[n])]
            for name in named
        }

    def here(self, frame: FrameType | None) -> tuple[str | None, bool]:
        """The module that runs what is called under a frame, and whether rules for those around may not reach it."""
        running: list[str] = []
        is_shared = False
        while frame is not None:
            if frame.f_code is _torch.MODULE_CALL:
                key = id(frame.f_locals["self"])
                name = self._first.get(key)
                if name is not None and (not running or running[-1] != name):
                    running.append(name)
                    is_shared |= key in self._with_two_names
            frame = frame.f_back
        if not running:
            return None, False
        return running[0], is_shared or running[1:] != self._around[running[0]]


class Listener:
    """Is told by kernels and by a dispatch mode, and tells of each operation `before` it runs and `after`.

    Which kernels are at the autocast keys depends on all policies that the process has used. So that the same sites are
    found whatever those were, an operation counts as a whole only if it is in `ruled`, by the dispatcher's names.
    """

    def __init__(
        self,
        owners: Owners,
        device: str,
        ruled: Collection[str],
        before: Callable[[Happening], None],
        after: Callable[[Happening, Any], None],
    ) -> None:
        self._owners = owners
        self.device = device
        self._ruled = ruled
        self.failures = Failures()
        self._told: tuple[Callable[..., None], ...] = (before, after)
        self._is_telling = False
        """Whether what runs now is the work of those who are told, and none of the program's."""
        self._kernels: list[Happening | None] = []
        """For each kernel that runs what it is told as, if it is: the outermost that a rule can be for."""
        self._open = 0
        self.failed_at: Happening | None = None
        """The first operation that has raised an error."""

    @property
    def depth(self) -> int:
        """How many rules are being carried out."""
        return self._open

    def casting_here(self) -> list[str]:
        """Device types on which autocast casts what runs now."""
        return [] if self._open or _torch.current_node() is not None else [self.device]

    def begin(self, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A kernel at an autocast key begins; other policies than this one may have put it there."""
        happening = None
        if op.name in self._ruled and not (self._open or self._is_telling):
            happening = self._happening(op.name, args, kwargs, False)
        if happening is not None:
            self._tell(0, happening)
        self._open += happening is not None
        self._kernels.append(happening)

    def end(self, result: Any) -> None:
        """It has ended."""
        happening = self._ended()
        if happening is not None:
            self._tell(1, happening, result)

    def fail(self, _error: BaseException) -> None:
        """It has raised an error."""
        happening = self._ended()
        self.failed_at = self.failed_at or happening

    def saw(self, func: Any, call: Any, out: Any, _seconds: float, _inside: Sequence[Cast]) -> None:
        """An operation below the autocast keys has run."""
        if self._open or self._is_telling:
            return
        kind, (args, kwargs) = kind_of(func), call
        happening = self._happening(_dispatcher_name(func), args, kwargs, kind.is_view)
        if happening is not None:
            self._tell(0, happening)
            self._tell(1, happening, out)

    def failed(self, func: Any, call: Any, _error: BaseException) -> None:
        """An operation below the autocast keys has raised an error."""
        if not self._open and self.failed_at is None:
            args, kwargs = call
            self.failed_at = self._happening(_dispatcher_name(func), args, kwargs, False)

    def _ended(self) -> Happening | None:
        happening = self._kernels.pop()
        self._open -= happening is not None
        return happening

    def _tell(self, which: int, *what: Any) -> None:
        self._is_telling = True
        try:
            self._told[which](*what)
        finally:
            self._is_telling = False

    def _happening(
        self, overload: str, args: tuple[Any, ...], kwargs: dict[str, Any], is_view: bool
    ) -> Happening | None:
        module, is_pinned = self._owners.here(frame_above(1))
        in_backward = _torch.current_node() is not None
        if in_backward and module is None:
            return None
        return Happening(module, overload, args, kwargs, is_pinned, in_backward, is_view)


def _dispatcher_name(func: Any) -> str:
    """`aten.softmax.int` -> `aten::softmax.int`; the default overload has no suffix."""
    name = str(func).replace(".", "::", 1)
    return name.removesuffix(".default")
