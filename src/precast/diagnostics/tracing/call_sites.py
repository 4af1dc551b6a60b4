"""Where something runs: the line of the program, the module, the phase of the step, and the region around.

Invariants:

- all is read from the stack when it is asked for: nothing is hooked to modules, so nothing is left on them, and what
  already runs when a trace begins is seen too;
- what is kept by the object of a program (its code, its modules) does not keep it alive, or is bounded.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import threading
import weakref
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from precast import _torch
from precast.diagnostics.schema import Phase
from precast.policy.module_names import modules_by_name, unwrapped
from precast.policy.policy import DEVICE_TYPES

__all__ = [
    "BEFORE_THE_TRACE",
    "Names",
    "Stack",
    "frame_above",
    "is_enabled",
    "outermost_regions",
    "read_stack",
    "region_around",
    "region_here",
    "stop_watching_regions",
    "watch_regions",
]

_PROGRAM, _LIBRARY, _MODULE, _BACKWARD, _OPTIMIZER = range(5)
_LIMIT: Final = 20_000
_codes: Final[dict[int, _Code]] = {}

_PRECAST: Final = (
    os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
)
_DEMO: Final = os.path.join(_PRECAST, "demo", "")
_NO_PROGRAM: Final = (
    os.path.dirname(torch.__file__) + os.sep,
    _PRECAST,
    "<precast",
    "<frozen",
    "<string>",
    "<eval_with_key>",
    contextlib.__file__,
)


BEFORE_THE_TRACE: Final = "opened before the trace"


class Stack(NamedTuple):
    """What the stack says about an operation."""

    source: str | None
    """The innermost line of the program."""
    module: nn.Module | None
    """The innermost module that runs, where it is not backward that calls the operation itself."""
    phase: Phase


def frame_above(depth: int) -> FrameType | None:
    """The frame of the function that called the caller of this one, for 1; further out, for more."""
    frame = inspect.currentframe()
    for _ in range(depth + 1):
        frame = frame.f_back if frame is not None else None
    return frame


def read_stack(frame: FrameType | None) -> Stack:
    """Reads the stack from `frame` outwards."""
    source: str | None = None
    while frame is not None:
        code = _codes.get(id(frame.f_code)) or _learnt(frame.f_code)
        kind = code.kind
        if kind == _PROGRAM:
            if source is None:
                source = code.text(frame.f_lineno)
        elif kind == _MODULE:
            return Stack(source or _outer_source(frame), frame.f_locals["self"], "forward")
        elif kind == _BACKWARD:
            return Stack(source, None, "backward")
        elif kind == _OPTIMIZER:
            return Stack(source or _outer_source(frame), None, "optimizer")
        frame = frame.f_back
    return Stack(source, None, "other")


def outermost_module(frame: FrameType | None) -> nn.Module | None:
    """The module that the program called, in which all others run."""
    found = None
    while frame is not None:
        if frame.f_code is _torch.MODULE_CALL:
            found = frame.f_locals["self"]
        frame = frame.f_back
    return found


def _outer_source(frame: FrameType) -> str | None:
    """The line of the program that called what `frame` runs, where no line of it is further in."""
    outer = frame.f_back
    while outer is not None:
        code = _codes.get(id(outer.f_code)) or _learnt(outer.f_code)
        if code.kind == _PROGRAM:
            return code.text(outer.f_lineno)
        outer = outer.f_back
    return None


class _Code:
    """What is known of a code object, which is not kept alive: what `torch.compile` makes ends with its function."""

    __slots__ = ("_name", "_ref", "_texts", "kind")

    def __init__(self, code: CodeType, forget: Callable[[Any], Any]) -> None:
        self.kind = _classified(code)
        self._ref = weakref.ref(code, forget)  # an id is given out again
        self._name = code.co_filename, code.co_name
        self._texts: dict[int, str] = {}

    def text(self, line: int) -> str:
        """A line of it, as a person would say it."""
        text = self._texts.get(line)
        if text is None:
            file, name = self._name
            text = self._texts[line] = f"{_short(file)}:{line} in {name}"
        return text


def _learnt(code: CodeType) -> _Code:
    if len(_codes) >= _LIMIT:
        _codes.clear()
    key, codes = id(code), _codes  # at the end of the process the module has no names any more
    known = _codes[key] = _Code(code, lambda _: codes.pop(key, None))
    return known


def _classified(code: CodeType) -> int:
    if code is _torch.MODULE_CALL:
        return _MODULE
    if code is _torch.BACKWARD:
        return _BACKWARD
    if _torch.is_optimizer_step(code):
        return _OPTIMIZER
    file = code.co_filename
    ours = file.startswith(_NO_PROGRAM) and not file.startswith(_DEMO)
    return _LIBRARY if ours else _PROGRAM


def _short(file: str) -> str:
    """A path as a person would say it: from the current folder, or from what Python imports from."""
    for folder in (os.getcwd(), *sorted(sys.path, key=len, reverse=True)):
        if folder and file.startswith(os.path.join(folder, "")):
            return os.path.relpath(file, folder)
    return file


class _Regions(threading.local):
    """What this thread does with regions since they are watched."""

    def __init__(self) -> None:
        self.open: list[tuple[str, str]] = []
        """Device type, and where it was entered."""
        self.outermost = 0
        """How many outermost ones have ended."""
        self.enabled: dict[str, bool] = {}
        """PyTorch's flags, as they are where the program runs."""


_regions: Final = _Regions()


class _Listener:
    def entered(self) -> None:
        frame = frame_above(2)
        assert frame is not None
        device = getattr(frame.f_locals.get("self"), "device", "")
        _regions.open.append((device, _outer_source(frame) or "?"))

    def left(self) -> None:
        if _regions.open:
            _regions.open.pop()
        _regions.outermost += not _regions.open

    def switched(self, device_type: str, enabled: bool) -> None:
        _regions.enabled[device_type] = enabled


_lock: Final = threading.Lock()
_watchers = 0


def watch_regions() -> None:
    """Has regions noted, in all threads, until `stop_watching_regions` is called as often."""
    global _watchers  # noqa: PLW0603 -- PyTorch has one function that counts regions
    with _lock:
        _watchers += 1
        if _watchers == 1:
            _torch.on_regions(_Listener())
    _regions.enabled = {device: torch.is_autocast_enabled(device) for device in DEVICE_TYPES}


def stop_watching_regions() -> None:
    """Ends one `watch_regions`."""
    global _watchers  # noqa: PLW0603
    with _lock:
        _watchers -= 1
        if _watchers == 0:
            _torch.on_regions(None)
    if not _watchers:
        _regions.open.clear()


def region_here(device_type: str) -> str | None:
    """Where the innermost region for a device type was opened; None where none was while they were watched."""
    for device, where in reversed(_regions.open):
        if device == device_type:
            return where
    return None


def region_around(device_type: str) -> str | None:
    """Where the region around was opened; None outside of all."""
    return region_here(device_type) or (BEFORE_THE_TRACE if is_enabled(device_type) else None)


def is_enabled(device_type: str) -> bool:
    """Whether autocast is on where the program runs; PyTorch's own flag is off inside a dispatch mode."""
    return _regions.enabled.get(device_type, False)


def outermost_regions() -> int:
    """How many outermost regions have ended in this thread while they were watched."""
    return _regions.outermost


class Names:
    """What modules are called: by the model that was given, by attachments, or by the class of the outermost one."""

    def __init__(self, models: list[nn.Module]) -> None:
        self._names: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        self._labels: dict[str, weakref.ref[nn.Module]] = {}
        self.types: dict[str, str] = {}
        for i, model in enumerate(models):
            self._learn(model, "" if i == 0 else self._label(model))

    def of(self, module: nn.Module, frame: FrameType | None) -> str:
        """The path of a module that runs under `frame`."""
        known = self._names.get(id(module))
        if known is not None and known[0]() is module:
            return known[1]
        root = outermost_module(frame)
        if root is None:  # not `or`: a compiled module may have no length, and then no truth either
            root = module
        known = self._names.get(id(root))
        at_root = known[1] if known is not None and known[0]() is root else self._label(root)
        self._learn(root, at_root)
        known = self._names.get(id(module))
        if known is None or known[0]() is not module:
            self._learn(module, self._label(module))
        return self._names[id(module)][1]

    def _learn(self, root: nn.Module, label: str) -> None:
        if len(self._names) > _LIMIT:
            self._names.clear()
        # The root first: a wrapper such as a compiled model has the name of what it wraps, and is not among them.
        for name, module in [("", root), *modules_by_name(root).items()]:
            path = ".".join(filter(None, (label, name)))
            known = self._names.get(id(module))
            if known is None or known[0]() is not module:
                self._names[id(module)] = weakref.ref(module), path
            self.types[path] = type(module).__name__

    def _label(self, module: nn.Module) -> str:
        """The class of a module, with a number where another one of that class lives."""
        kind = type(unwrapped(module)).__name__
        number = 1
        while True:
            label = kind if number == 1 else f"{kind} {number}"
            holder = self._labels.get(label)
            if holder is None or holder() in (None, module):
                self._labels[label] = weakref.ref(module)
                return label
            number += 1
