"""Isolation of the program's modules from those of precast that have the same name.

The program's folder may hold a `click.py`, a `jinja2.py` or a `queue.py`. The program imports those, while precast has
imported other modules of these names and needs them when it writes its report.

Invariants: the program imports what it imports under `python`; precast never imports the program's modules, early or
late; both have the same PyTorch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import all_suffixes
from types import ModuleType
from typing import Final

__all__ = ["ModuleIsolation"]

_STAYS: Final = frozenset(
    {"__main__", "precast", "site", "sitecustomize", "torch", "usercustomize"}
)
_LATE: Final = frozenset({"jinja2", "markupsafe", "narwhals", "plotly"})
"""The packages for the page, imported at the end."""


class ModuleIsolation:
    """Two sets of modules, one of which is in `sys.modules`: precast's until `begin`, then the program's."""

    def __init__(self) -> None:
        self._folder: str | None = None
        self._names: frozenset[str] = frozenset()
        self._ours: dict[str, ModuleType] = {}

    def begin(self) -> None:
        """Switch to the program's modules, before its start. Its folder is the first in `sys.path`."""
        folder = sys.path[0] if sys.path else None
        if folder in sys.path[1:]:
            return  # precast imports from this folder, too
        names = {*map(_top, sys.modules), *sys.stdlib_module_names, *_LATE}
        shared = names & set(_modules_in(folder))
        self._folder = folder
        self._names = frozenset(name for name in shared if not _is_loaded_by_python(name))
        self._ours = self._take()

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Return a context in which imports find precast's modules."""
        if not self._names:
            yield
            return
        theirs, path = self._take(), list(sys.path)
        sys.modules.update(self._ours)
        sys.path[:] = [folder for folder in path if folder != self._folder]
        try:
            yield
        finally:
            sys.path[:] = path
            self._ours = self._take()
            sys.modules.update(theirs)

    def _take(self) -> dict[str, ModuleType]:
        return {
            name: sys.modules.pop(name) for name in list(sys.modules) if _top(name) in self._names
        }


def _top(name: str) -> str:
    return name.partition(".")[0]


def _is_loaded_by_python(name: str) -> bool:
    """Return True for a module that Python loads before the first line of any program."""
    if name in _STAYS or name in sys.builtin_module_names:
        return True
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return spec is not None and spec.origin in {"built-in", "frozen"}


def _modules_in(folder: str | None) -> Iterator[str]:
    """Yield the names of the modules and packages in a folder."""
    try:
        entries = list(os.scandir(folder or os.curdir))
    except OSError:  # an archive
        return
    suffixes = all_suffixes()
    for entry in entries:
        for suffix in suffixes:
            if entry.name.endswith(suffix):
                yield entry.name.removesuffix(suffix)
            elif os.path.isfile(os.path.join(entry.path, f"__init__{suffix}")):
                yield entry.name
