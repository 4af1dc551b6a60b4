"""Calls a function when the program has loaded PyTorch, before its next line runs.

Invariants: a program that never loads PyTorch never waits for it; what the program does before (it may set variables of
the environment that PyTorch reads when it is loaded) has its effect; the hook is gone once it has acted.

It is not wrapt's `when_imported`, because that acts as soon as torch is whole, while a module of precast's that imports
it (a program may begin with `precast.autocast`) is not; leaves its finder in `sys.meta_path`; and takes a tenth of a
second to import.
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
    """Calls `act` once: now if PyTorch is there, else in the import that brings it."""
    if sys.modules.get("torch") is not None:
        act()
    else:
        sys.meta_path.insert(0, _TorchImportHook(act))


class _TorchImportHook(MetaPathFinder):
    """Watches imports of torch, and of precast's modules, which may be what loads it: they must be whole as well."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self._depth = 0
        self._asking = False

    def find_spec(self, fullname: str, *_: Sequence[str] | ModuleType | None) -> ModuleSpec | None:
        """Has the other finders find the module, and its loader call `_execute` once instead of its own method."""
        if self._asking or not (fullname == "torch" or fullname.startswith("precast.")):
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            vars(spec.loader)["exec_module"] = partial(self._execute, spec.loader)
        return spec

    def _execute(self, loader: Any, module: ModuleType) -> None:
        """Runs a module's code; after the outermost that has loaded PyTorch it is time to act."""
        vars(loader).pop("exec_module", None)
        self._depth += 1
        try:
            loader.exec_module(module)
        finally:
            self._depth -= 1
        if self._depth == 0 and sys.modules.get("torch") is not None and self in sys.meta_path:
            sys.meta_path.remove(self)
            self._act()
