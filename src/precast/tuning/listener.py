"""Listener for the operations of a model, with the module that runs each.

Invariants:
- an operation inside one that has an autocast kernel belongs to that one, because a rule acts on the outer one;
- operations of the backward pass are left out, apart from those that a checkpoint repeats;
- a module's name is the first of its names; modules that are not the model's do not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from types import FrameType
from typing import Any, Final, NamedTuple

from torch import nn

from precast import _torch
from precast.diagnostics.failures import Failures
from precast.diagnostics.tracing.call_sites import frame_above
from precast.diagnostics.tracing.listening import OperationListener
from precast.engine.operation import Operation
from precast.engine.operator_kinds import Cast, kind_of
from precast.policy.module_names import modules_by_name, name_of_each
from precast.policy.module_plan import is_called, outwards
from precast.policy.rows import short, split
from precast.tuning.sites import OperationSite

__all__ = ["ModuleStack", "ObservedCall", "SiteListener"]


class ObservedCall(NamedTuple):
    """One call of an operation."""

    module: str | None
    """The name of the module that runs it; None where no module of the model does."""
    overload: str
    """The dispatcher's name, such as `aten::softmax.int`."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_pinned: bool
    """True if rules for modules around may not reach it."""
    is_repeated: bool
    """True if a checkpoint repeats it."""
    is_view: bool
    """True if its results share its arguments' memory."""

    @property
    def site(self) -> OperationSite:
        """The operation of the module, by its name in a policy's row, such as `softmax` for `aten::softmax.int`."""
        return OperationSite(self.module, short(split(self.overload)[0]))


class ModuleStack:
    """Finds the module of a model that runs a frame."""

    def __init__(self, model: nn.Module) -> None:
        named = modules_by_name(model)
        self.names: Final = tuple(named)
        self._first_names = {id(module): name for name, module in name_of_each(model)}
        counts = Counter(map(id, named.values()))
        self._with_two_names = {key for key, count in counts.items() if count > 1}
        self._around = {
            name: [n for n in outwards(name) if n in named and is_called(named[n])]
            for name in named
        }

    def module_of(self, frame: FrameType | None) -> tuple[str | None, bool]:
        """Return the module that runs a frame, and True if rules for modules around may not reach it."""
        running: list[str] = []
        is_shared = False
        while frame is not None:
            if frame.f_code is _torch.MODULE_CALL:
                key = id(frame.f_locals["self"])
                name = self._first_names.get(key)
                if name is not None and (not running or running[-1] != name):
                    running.append(name)
                    is_shared |= key in self._with_two_names
            frame = frame.f_back
        if not running:
            return None, False
        return running[0], is_shared or running[1:] != self._around[running[0]]


class SiteListener(OperationListener):
    """Calls `before` and `after` for each operation that kernels and a dispatch mode report.

    All policies that the process has used decide which operations have kernels at the autocast keys. So that the same
    sites are recorded in any process, an operation counts as a whole only if it is in `ruled`, by the dispatcher's
    name.
    """

    def __init__(self, model: nn.Module, device: str, ruled: Collection[str]) -> None:
        self.modules = ModuleStack(model)
        self.device = device
        self._ruled = ruled
        self.failures = Failures()
        self._kernels: list[ObservedCall | None] = []
        """The call of each kernel that runs; None if it is not reported."""
        self._open = 0
        """The number of reported kernels that run, and of callbacks, whose operations are not the program's."""
        self.failed_call: ObservedCall | None = None
        """The first operation that has raised an error."""

    def before(self, call: ObservedCall) -> None:
        """Handle the start of an operation."""

    def after(self, call: ObservedCall, out: Any) -> None:
        """Handle the end of an operation."""

    @property
    def depth(self) -> int:
        """The number of rules being carried out."""
        return self._open

    def casting_here(self) -> list[str]:
        """Return the device types on which autocast casts the current operation."""
        return [] if self._open or _torch.current_node() is not None else [self.device]

    def begin(self, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Handle the start of a kernel at an autocast key, which another policy may have put there."""
        call = None
        if op.name in self._ruled and not self._open:
            call = self._observe(op.name, args, kwargs)
        if call is not None:
            self._report(self.before, call)
            self._open += 1
        self._kernels.append(call)

    def end(self, result: Any) -> None:
        """Handle the end of a kernel."""
        if call := self._pop():
            self._report(self.after, call, result)

    def fail(self, _error: BaseException) -> None:
        """Handle an error of a kernel."""
        call = self._pop()
        self.failed_call = self.failed_call or call

    def saw(self, func: Any, call: Any, out: Any, _seconds: float, _inside: Sequence[Cast]) -> None:
        """Handle an operation below the autocast keys."""
        if not self._open:
            is_view = kind_of(func).is_view
            if observed := self._observe(_dispatcher_name(func), *call, is_view=is_view):
                self._report(self.before, observed)
                self._report(self.after, observed, out)

    def failed(self, func: Any, call: Any, _error: BaseException) -> None:
        """Handle an error of an operation below the autocast keys."""
        if not self._open and self.failed_call is None:
            self.failed_call = self._observe(_dispatcher_name(func), *call)

    def _pop(self) -> ObservedCall | None:
        call = self._kernels.pop()
        self._open -= call is not None
        return call

    def _report(self, callback: Callable[..., None], *arguments: Any) -> None:
        self._open += 1
        try:
            callback(*arguments)
        finally:
            self._open -= 1

    def _observe(
        self, overload: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_view: bool = False
    ) -> ObservedCall | None:
        module, is_pinned = self.modules.module_of(frame_above(1))
        in_backward = _torch.current_node() is not None
        if in_backward and module is None:
            return None
        return ObservedCall(module, overload, args, kwargs, is_pinned, in_backward, is_view)


def _dispatcher_name(func: Any) -> str:
    """Return the dispatcher's name: `aten.softmax.int` -> `aten::softmax.int`; the default overload has no suffix."""
    return str(func).replace(".", "::", 1).removesuffix(".default")
