"""A hook that runs as soon as the program has imported PyTorch.

Invariants: PyTorch is imported only by the program, which may not need it, or may set environment variables before;
the hook removes itself when it runs.

`when_imported` of wrapt would run too early, before the module of precast that imports torch is complete. It also stays
in `sys.meta_path`, and its import takes 0.1 seconds.
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


def when_torch_is_loaded(callback: Callable[[], None]) -> None:
    """Call `callback` once: now if PyTorch is loaded, else at the end of the import that loads it."""
    if sys.modules.get("torch") is not None:
        callback()
    else:
        sys.meta_path.insert(0, _TorchImportHook(callback))


class _TorchImportHook(MetaPathFinder):
    """A finder of torch and of precast's modules. The hook runs when the outermost of them is complete."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._depth = 0
        self._searching = False

    def find_spec(self, fullname: str, *_: Sequence[str] | ModuleType | None) -> ModuleSpec | None:
        """Return the spec from the other finders, with a loader that calls `_execute`."""
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
        """Run the code of a module, and then the hook, if the module is the outermost one and has loaded PyTorch."""
        vars(loader).pop("exec_module", None)
        self._depth += 1
        try:
            loader.exec_module(module)
        finally:
            self._depth -= 1
        if self._depth == 0 and sys.modules.get("torch") is not None and self in sys.meta_path:
            sys.meta_path.remove(self)
            self._callback()
