"""The place of an operation: line of the program, module, phase of the step, and the region around it.

Invariants:

- everything is read from the stack on demand. No module gets a hook, so nothing has to be removed from it, and calls
  that already run when a trace begins are found too;
- data about the program's code and modules does not keep them alive, or is bounded.
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
from precast.policy.module_names import modules_by_name, unwrapped
from precast.policy.policy import DEVICE_TYPES
from precast.report.schema import Phase

__all__ = [
    "ModuleNames",
    "frame_above",
    "is_enabled",
    "outermost_region",
    "outermost_regions",
    "program_line",
    "read_stack",
    "region_around",
    "start_recording_regions",
    "stop_recording_regions",
]

_PROGRAM, _LIBRARY, _MODULE, _BACKWARD, _OPTIMIZER = range(5)
_LIMIT: Final = 20_000
_frame_kinds: Final[dict[int, tuple[int, weakref.ref[CodeType]]]] = {}
"""Maps id(code) to a frame kind. Entries go with the code object (`torch.compile` creates short-lived ones)."""

_PRECAST: Final = (
    os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
)
_DEMO: Final = os.path.join(_PRECAST, "cli", "demo", "")
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
    """Return the frame of the caller's caller for depth 1, and frames further out for larger depths.

    The caller's own frame is not offered: a function that holds its frame is a reference cycle and keeps its arguments
    alive.
    """
    frame = inspect.currentframe()
    for _ in range(depth + 1):
        frame = frame.f_back if frame is not None else None
    return frame


def read_stack(frame: FrameType | None) -> tuple[str | None, nn.Module | None, Phase]:
    """Read the stack from `frame` outwards.

    Returns:
        The innermost line of the program; the innermost module, except in backward; the phase.
    """
    source: str | None = None
    while frame is not None:
        kind, _ = _frame_kinds.get(id(frame.f_code)) or _classify_and_cache(frame.f_code)
        if kind == _PROGRAM:
            source = source or _format_location(frame)
        elif kind == _MODULE:
            return source or _outer_source(frame), frame.f_locals["self"], "forward"
        elif kind == _BACKWARD:
            return source, None, "backward"
        elif kind == _OPTIMIZER:
            return source or _outer_source(frame), None, "optimizer"
        frame = frame.f_back
    return source, None, "other"


def program_line(frame: FrameType | None) -> str:
    """Return the innermost line of the program from `frame` outwards; "?" if there is none."""
    return _outer_source(frame) or "?"


def _outer_source(frame: FrameType | None) -> str | None:
    """Return the innermost line of the program from `frame` outwards; None if there is none."""
    while frame is not None:
        kind, _ = _frame_kinds.get(id(frame.f_code)) or _classify_and_cache(frame.f_code)
        if kind == _PROGRAM:
            return _format_location(frame)
        frame = frame.f_back
    return None


def _outermost_module(frame: FrameType | None) -> nn.Module | None:
    module = None
    while frame is not None:
        if frame.f_code is _torch.MODULE_CALL:
            module = frame.f_locals["self"]
        frame = frame.f_back
    return module


def _classify_and_cache(code: CodeType) -> tuple[int, weakref.ref[CodeType]]:
    if len(_frame_kinds) >= _LIMIT:
        _frame_kinds.clear()
    key, kinds = id(code), _frame_kinds  # at the end of the process, the module's globals are gone
    forget = weakref.ref(code, lambda _: kinds.pop(key, None))  # Python reuses ids
    entry = kinds[key] = _kind_of(code), forget
    return entry


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


def _format_location(frame: FrameType) -> str:
    """Return "file:line in function" for a frame, with a short path."""
    code = frame.f_code
    return f"{_short_path(code.co_filename)}:{frame.f_lineno} in {code.co_name}"


@functools.lru_cache(maxsize=_LIMIT)
def _short_path(file: str) -> str:
    """Return a path relative to the current folder, or to a folder on `sys.path`."""
    for folder in (os.getcwd(), *sorted(sys.path, key=len, reverse=True)):
        if folder and file.startswith(os.path.join(folder, "")):
            return os.path.relpath(file, folder)
    return file


class _ThreadRegions(threading.local):
    def __init__(self) -> None:
        self.open: list[tuple[str, str]] = []
        """The device type of each open region, and the line that entered it."""
        self.outermost = 0
        """The number of outermost regions that have ended."""
        self.enabled: dict[str, bool] = {}
        """PyTorch's autocast flags outside of dispatch modes."""


_regions: Final = _ThreadRegions()


class _RegionListener:
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


def start_recording_regions(*, is_first: bool) -> None:
    """Record regions in all threads, for the first listener, and read the autocast flags of this thread."""
    if is_first:
        _torch.on_regions(_RegionListener())
    _regions.enabled = {device: torch.is_autocast_enabled(device) for device in DEVICE_TYPES}


def stop_recording_regions() -> None:
    """Stop recording regions."""
    _torch.on_regions(None)
    _regions.open.clear()


def region_around(device_type: str) -> str | None:
    """Return the line that opened the innermost region for a device type; None outside of all regions."""
    for device, line in reversed(_regions.open):
        if device == device_type:
            return line
    return "opened before the trace" if is_enabled(device_type) else None


def is_enabled(device_type: str) -> bool:
    """Return True if autocast is on in the program; PyTorch's own flag is off inside a dispatch mode."""
    return _regions.enabled.get(device_type, False)


def outermost_region() -> int | None:
    """Return the number of this thread's current outermost region; None outside of regions."""
    return _regions.outermost if _regions.open else None


def outermost_regions() -> int:
    """Return the number of outermost regions that have ended in this thread during recording."""
    return _regions.outermost


class ModuleNames:
    """Display names of modules, from the traced model, an attachment, or the outermost module's class."""

    def __init__(self, models: list[nn.Module]) -> None:
        self._paths: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        self._labels: weakref.WeakValueDictionary[str, nn.Module] = weakref.WeakValueDictionary()
        self.types: dict[str, str] = {}
        for i, model in enumerate(models):
            self._learn(model, "" if i == 0 else self._label(model))

    def of(self, module: nn.Module, frame: FrameType | None) -> str:
        """Return the path of a module that runs under `frame`."""
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
        if path is None:  # not a submodule of the outermost module
            path = self._label(module)
            self._learn(module, path)
        return path

    def _path(self, module: nn.Module) -> str | None:
        entry = self._paths.get(id(module))
        return entry[1] if entry is not None and entry[0]() is module else None

    def _learn(self, root: nn.Module, label: str) -> None:
        if len(self._paths) > _LIMIT:
            self._paths.clear()
        # The root first: a wrapper such as a compiled model has the name of the wrapped model, and is not listed.
        for name, module in [("", root), *modules_by_name(root).items()]:
            path = ".".join(filter(None, (label, name)))
            if self._path(module) is None:
                self._paths[id(module)] = weakref.ref(module), path
            self.types[path] = type(module).__name__

    def _label(self, module: nn.Module) -> str:
        """Return the class of a module, with a number if another module of that class has the label."""
        kind: str = type(unwrapped(module)).__name__
        labels = itertools.chain([kind], (f"{kind} {number}" for number in itertools.count(2)))
        label = next(each for each in labels if self._labels.get(each, module) is module)
        self._labels[label] = module
        return label
