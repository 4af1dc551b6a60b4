"""Calls a function when the program has loaded PyTorch, before its next line runs.

Invariants: a program that never loads it never waits for it; what the program does before (set variables of the
environment that PyTorch reads when it is loaded) has its effect.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
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
    """Waits in the import system. Modules of precast's may be what loads PyTorch: then they have to be whole, too."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self._depth = 0
        self._asking = False

    def find_spec(self, fullname: str, *_: Sequence[str] | ModuleType | None) -> ModuleSpec | None:
        if self._asking or not (fullname == "torch" or fullname.startswith("precast.")):
            return None
        self._asking = True  # the others
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Watched(spec.loader, self)
        return spec

    def executed(self, run: Callable[[], None]) -> None:
        """Runs a module's code; after the outermost that has loaded PyTorch it is time to act."""
        self._depth += 1
        try:
            run()
        finally:
            self._depth -= 1
        if self._depth == 0 and sys.modules.get("torch") is not None and self in sys.meta_path:
            sys.meta_path.remove(self)
            self._act()


class _Watched(Loader):
    """A module's own loader, which steps aside as soon as it has been asked to load."""

    def __init__(self, loader: Any, herald: _TorchImportHook) -> None:
        self._loader = loader
        self._herald = herald

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._herald.executed(lambda: self._loader.exec_module(module))
