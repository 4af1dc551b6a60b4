"""A hook that runs when the program has loaded PyTorch, before its next line.

Invariants: a program that never loads PyTorch never waits for it; the program may set environment variables that
PyTorch reads when it is loaded; the hook removes itself when it runs.

`when_imported` of wrapt is not used: it runs as soon as torch is loaded, when a module of precast that imports torch (a
program may begin with `precast.autocast`) is incomplete; it stays in `sys.meta_path`; its import takes 0.1 seconds.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["when_torch_is_loaded"]


def when_torch_is_loaded(act: Callable[[], None]) -> None:
    """Call `act` once: now if PyTorch is loaded, else in the import that loads it."""
    if sys.modules.get("torch") is not None:
        act()
    else:
        sys.meta_path.insert(0, _TorchImportHook(act))


class _TorchImportHook(MetaPathFinder):
    """A finder for torch and precast's modules: a module that loads torch must be complete before the hook runs."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self._depth = 0
        self._searching = False

    def find_spec(self, fullname: str, *_: Sequence[str] | ModuleType | None) -> ModuleSpec | None:
        """Return the spec of the other finders, with a loader that calls `_execute` once."""
        if self._searching or not (fullname == "torch" or fullname.startswith("precast.")):
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            vars(spec.loader)["exec_module"] = partial(self._execute, spec.loader)
        return spec

    def _execute(self, loader: Any, module: ModuleType) -> None:
        """Run a module's code, and the hook after the outermost module that has loaded PyTorch."""
        vars(loader).pop("exec_module", None)
        self._depth += 1
        try:
            loader.exec_module(module)
        finally:
            self._depth -= 1
        if self._depth == 0 and sys.modules.get("torch") is not None and self in sys.meta_path:
            sys.meta_path.remove(self)
            self._act()
