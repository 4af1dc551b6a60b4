"""Isolation of the program's modules from precast's modules with the same names.

The program's folder may contain a `click.py`, a `jinja2.py` or a `queue.py`, which the program imports. precast has
imported other modules with these names, and needs them when it writes its report.

Invariants: the program imports the same modules as under `python`; precast never imports one of them; both have the
same PyTorch.
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

_SHARED_MODULES: Final = frozenset(
    {"__main__", "precast", "site", "sitecustomize", "torch", "usercustomize"}
)
_REPORT_PACKAGES: Final = frozenset({"jinja2", "markupsafe", "narwhals", "plotly"})
"""Packages that precast imports at the end, for the report."""


class ModuleIsolation:
    """Two sets of modules, of which one is in `sys.modules`: precast's until `begin`, then the program's."""

    def __init__(self) -> None:
        self._folder: str | None = None
        self._names: frozenset[str] = frozenset()
        self._precast_modules: dict[str, ModuleType] = {}

    def begin(self) -> None:
        """Switch to the modules of the program, which is about to start. Its folder is the first in `sys.path`."""
        folder = sys.path[0] if sys.path else None
        if folder in sys.path[1:]:
            return  # precast also imports from this folder
        names = {*map(_top_level_name, sys.modules), *sys.stdlib_module_names, *_REPORT_PACKAGES}
        common = names & set(_modules_in(folder))
        self._folder = folder
        self._names = frozenset(name for name in common if not _is_loaded_by_python(name))
        self._precast_modules = self._remove_modules()

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Return a context in which imports find precast's modules."""
        if not self._names:
            yield
            return
        program_modules, path = self._remove_modules(), list(sys.path)
        sys.modules.update(self._precast_modules)
        sys.path[:] = [folder for folder in path if folder != self._folder]
        try:
            yield
        finally:
            sys.path[:] = path
            self._precast_modules = self._remove_modules()
            sys.modules.update(program_modules)

    def _remove_modules(self) -> dict[str, ModuleType]:
        return {
            name: sys.modules.pop(name)
            for name in list(sys.modules)
            if _top_level_name(name) in self._names
        }


def _top_level_name(name: str) -> str:
    return name.partition(".")[0]


def _is_loaded_by_python(name: str) -> bool:
    """Return True for a module that Python loads before the first line of any program."""
    if name in _SHARED_MODULES or name in sys.builtin_module_names:
        return True
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return spec is not None and spec.origin in {"built-in", "frozen"}


def _modules_in(folder: str | None) -> Iterator[str]:
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
