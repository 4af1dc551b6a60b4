"""Where something runs: the line of the program, the module, the phase of the step, and the region around.

Invariants:

- everything is read from the stack when it is asked for. No module gets a hook, so nothing is left on it, and what
  already runs when a trace begins is seen too;
- what is kept about an object of the program (its code, its modules) does not keep it alive, or is bounded.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
import sys
import threading
import weakref
from types import CodeType, FrameType
from typing import Final

import torch
from torch import nn

from precast import _torch
from precast.diagnostics.schema import Phase
from precast.policy.module_names import modules_by_name, unwrapped
from precast.policy.policy import DEVICE_TYPES

__all__ = [
    "Names",
    "frame_above",
    "is_enabled",
    "outermost_region",
    "outermost_regions",
    "program_line",
    "read_stack",
    "region_around",
    "start_noting_regions",
    "stop_noting_regions",
]

_PROGRAM, _LIBRARY, _MODULE, _BACKWARD, _OPTIMIZER = range(5)
_LIMIT: Final = 20_000
_kinds: Final[dict[int, tuple[int, weakref.ref[CodeType]]]] = {}
"""The id of a code object -> which of the above it is; what `torch.compile` makes is freed with its function."""

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


def frame_above(depth: int) -> FrameType | None:
    """The frame of the caller's caller for 1, and further out for more.

    Not the caller's own: a function that holds its own frame is a reference cycle, and keeps its arguments alive.
    """
    frame = inspect.currentframe()
    for _ in range(depth + 1):
        frame = frame.f_back if frame is not None else None
    return frame


def read_stack(frame: FrameType | None) -> tuple[str | None, nn.Module | None, Phase]:
    """Reads the stack from `frame` outwards.

    Returns:
        The innermost line of the program; the innermost module, unless backward calls the operation itself; the phase.
    """
    source: str | None = None
    while frame is not None:
        kind, _ = _kinds.get(id(frame.f_code)) or _learnt(frame.f_code)
        if kind == _PROGRAM:
            source = source or _line(frame)
        elif kind == _MODULE:
            return source or _outer_source(frame), frame.f_locals["self"], "forward"
        elif kind == _BACKWARD:
            return source, None, "backward"
        elif kind == _OPTIMIZER:
            return source or _outer_source(frame), None, "optimizer"
        frame = frame.f_back
    return source, None, "other"


def program_line(frame: FrameType | None) -> str:
    """Return the innermost line of the program from `frame` outwards; "?" where no code of the program runs."""
    return _outer_source(frame) or "?"


def _outer_source(frame: FrameType | None) -> str | None:
    """The innermost line of the program from `frame` outwards."""
    while frame is not None:
        kind, _ = _kinds.get(id(frame.f_code)) or _learnt(frame.f_code)
        if kind == _PROGRAM:
            return _line(frame)
        frame = frame.f_back
    return None


def _outermost_module(frame: FrameType | None) -> nn.Module | None:
    """The module that the program called, in which all others run."""
    found = None
    while frame is not None:
        if frame.f_code is _torch.MODULE_CALL:
            found = frame.f_locals["self"]
        frame = frame.f_back
    return found


def _learnt(code: CodeType) -> tuple[int, weakref.ref[CodeType]]:
    if len(_kinds) >= _LIMIT:
        _kinds.clear()
    key, kinds = id(code), _kinds  # when the process ends, the module has no names any more
    forget = weakref.ref(code, lambda _: kinds.pop(key, None))  # an id is given out again
    known = kinds[key] = _kind_of(code), forget
    return known


def _kind_of(code: CodeType) -> int:
    if code is _torch.MODULE_CALL:
        return _MODULE
    if code is _torch.BACKWARD:
        return _BACKWARD
    if _torch.is_optimizer_step(code):
        return _OPTIMIZER
    file = code.co_filename
    ours = file.startswith(_NO_PROGRAM) and not file.startswith(_DEMO)
    return _LIBRARY if ours else _PROGRAM


def _line(frame: FrameType) -> str:
    """The line that a frame runs, as a person would say it."""
    code = frame.f_code
    return f"{_short(code.co_filename)}:{frame.f_lineno} in {code.co_name}"


@functools.lru_cache(maxsize=_LIMIT)
def _short(file: str) -> str:
    """A path from the current folder, or from a folder that Python imports from."""
    for folder in (os.getcwd(), *sorted(sys.path, key=len, reverse=True)):
        if folder and file.startswith(os.path.join(folder, "")):
            return os.path.relpath(file, folder)
    return file


class _Regions(threading.local):
    """What this thread has done with regions since they are noted."""

    def __init__(self) -> None:
        self.open: list[tuple[str, str]] = []
        """The device type of each open region, and where it was entered."""
        self.outermost = 0
        """How many outermost ones have ended."""
        self.enabled: dict[str, bool] = {}
        """PyTorch's flags, as they are where the program runs."""


_regions: Final = _Regions()


class _Listener:
    def entered(self) -> None:
        region = frame_above(2)  # its `__enter__`
        assert region is not None
        device = getattr(region.f_locals.get("self"), "device", "")
        _regions.open.append((device, _outer_source(region.f_back) or "?"))

    def left(self) -> None:
        if _regions.open:
            _regions.open.pop()
        _regions.outermost += not _regions.open

    def switched(self, device_type: str, enabled: bool) -> None:
        _regions.enabled[device_type] = enabled


def start_noting_regions(*, is_first: bool) -> None:
    """Has regions noted in all threads, for the first trace, and learns which flags this thread has set."""
    if is_first:
        _torch.on_regions(_Listener())
    _regions.enabled = {device: torch.is_autocast_enabled(device) for device in DEVICE_TYPES}


def stop_noting_regions() -> None:
    """Has regions noted no more."""
    _torch.on_regions(None)
    _regions.open.clear()


def region_around(device_type: str) -> str | None:
    """Where the innermost region for a device type was opened; None outside of all regions."""
    for device, where in reversed(_regions.open):
        if device == device_type:
            return where
    return "opened before the trace" if is_enabled(device_type) else None


def is_enabled(device_type: str) -> bool:
    """Whether autocast is on where the program runs; PyTorch's own flag is off inside a dispatch mode."""
    return _regions.enabled.get(device_type, False)


def outermost_region() -> int | None:
    """Return the number of the outermost region around in this thread; None outside of regions."""
    return _regions.outermost if _regions.open else None


def outermost_regions() -> int:
    """How many outermost regions have ended in this thread while they were noted."""
    return _regions.outermost


class Names:
    """What modules are called: by the model that was given, by attachments, or by the class of the outermost one."""

    def __init__(self, models: list[nn.Module]) -> None:
        self._paths: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        self._labels: weakref.WeakValueDictionary[str, nn.Module] = weakref.WeakValueDictionary()
        self.types: dict[str, str] = {}
        for i, model in enumerate(models):
            self._learn(model, "" if i == 0 else self._label(model))

    def of(self, module: nn.Module, frame: FrameType | None) -> str:
        """The path of a module that runs under `frame`."""
        path = self._path(module)
        if path is None:
            root = _outermost_module(frame)
            if (
                root is None
            ):  # not `or`: a compiled module may have no length, and then no truth either
                root = module
            at_root = self._path(root)
            self._learn(root, self._label(root) if at_root is None else at_root)
            path = self._path(module)
        if path is None:  # it is no submodule of the outermost one
            path = self._label(module)
            self._learn(module, path)
        return path

    def _path(self, module: nn.Module) -> str | None:
        known = self._paths.get(id(module))
        return known[1] if known is not None and known[0]() is module else None

    def _learn(self, root: nn.Module, label: str) -> None:
        if len(self._paths) > _LIMIT:
            self._paths.clear()
        # The root first: a wrapper such as a compiled model has the name of what it wraps, and is not among them.
        for name, module in [("", root), *modules_by_name(root).items()]:
            path = ".".join(filter(None, (label, name)))
            if self._path(module) is None:
                self._paths[id(module)] = weakref.ref(module), path
            self.types[path] = type(module).__name__

    def _label(self, module: nn.Module) -> str:
        """The class of a module, with a number if another module of that class has the label."""
        kind: str = type(unwrapped(module)).__name__
        labels = itertools.chain([kind], (f"{kind} {number}" for number in itertools.count(2)))
        label = next(each for each in labels if self._labels.get(each, module) is module)
        self._labels[label] = module
        return label
