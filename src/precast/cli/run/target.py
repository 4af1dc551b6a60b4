"""The program that is run, a script or a module, and how it becomes `__main__`.

Invariants: the program finds what Python itself would have given it: `__main__` with its attributes, `sys.argv`,
`sys.path[0]`, line numbers and source. It stays `__main__` until the process ends, because pickles, spawned processes
and exit functions look for it there. Nothing here imports torch.
"""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import BuiltinImporter, SourceFileLoader, SourcelessFileLoader
from pkgutil import get_importer
from runpy import _run_module_as_main  # type: ignore[attr-defined]
from types import CodeType, ModuleType
from typing import Any

__all__ = ["Target"]


@dataclass(frozen=True)
class Target:
    """A program and its arguments.

    Attributes:
        name: the path of a script, of a folder or archive with a `__main__.py`; "-" for what is read from stdin; or a
            module's name.
        is_module: whether `name` is a module's, as after `python -m`.
        arguments: what the program finds in `sys.argv[1:]`.
    """

    name: str
    is_module: bool
    arguments: tuple[str, ...] = ()

    def check(self) -> None:
        """Whether there is such a script; modules are looked for when they run, as that may run code.

        Raises:
            ValueError: there is none.
        """
        if not (self.is_module or self.is_stdin or os.path.exists(self.name)):
            raise ValueError(f"there is no script {self.name!r}; a module is run by -m {self.name}")

    @property
    def is_stdin(self) -> bool:
        """Whether the program is read from stdin."""
        return self.name == "-" and not self.is_module

    @property
    def command(self) -> list[str]:
        """What was asked for, as `python` would be told."""
        return [*(["-m"] if self.is_module else []), self.name, *self.arguments]

    def run(self, starts: Callable[[], None] = lambda: None) -> None:
        """Runs the program as `__main__`; what it raises is raised here.

        Args:
            starts: called when `sys.path` is the program's, before anything of the program is imported or run.
        """
        sys.argv[:] = [self.name, *self.arguments]
        path = os.path.abspath(self.name)
        if self.is_module:
            sys.argv[0] = "-m"  # while its packages are imported
            _as_python_does(os.getcwd(), self.name, starts)
        elif self.is_stdin:
            _first_in_path("", starts)
            _run(sys.stdin.buffer.read(), BuiltinImporter, "<stdin>")
        elif get_importer(path) is not None:  # it is a folder or an archive
            _as_python_does(path, "__main__", starts)
        else:
            _first_in_path(os.path.dirname(os.path.realpath(path)), starts)
            compiled = path.endswith(".pyc")
            loader = (SourcelessFileLoader if compiled else SourceFileLoader)("__main__", path)
            # The source is compiled here: `get_code` would leave a compiled copy of the script beside it.
            code = loader.get_code("__main__") if compiled else loader.get_data(path)
            _run(code, loader, path)


def _first_in_path(folder: str, starts: Callable[[], None]) -> None:
    """Puts `folder` where Python has put that of the command `precast`, unless Python was told to put none there."""
    if not sys.flags.safe_path:
        sys.path[0] = folder
    starts()


def _as_python_does(folder: str, name: str, starts: Callable[[], None]) -> None:
    """Runs a module, or the `__main__` of a folder or an archive, by the function by which Python itself does."""
    is_container = name == "__main__"
    if is_container and sys.flags.safe_path:
        sys.path.insert(0, folder)  # Python is told of no other place where the program is
    _first_in_path(folder, starts)
    _new_main()
    _run_module_as_main(name, alter_argv=not is_container)


def _run(source: bytes | CodeType | None, loader: Any, path: str) -> None:
    assert source is not None  # unreadable code is an ImportError
    if isinstance(source, bytes):
        source = compile(source, path, "exec", dont_inherit=True)
    main = _new_main()
    vars(main).update(__file__=path, __loader__=loader)
    exec(source, vars(main))


def _new_main() -> ModuleType:
    """A fresh `__main__`, with what Python puts there before the first line of a script runs."""
    main = ModuleType("__main__")
    vars(main).update(__builtins__=builtins, __annotations__={}, __cached__=None)
    sys.modules["__main__"] = main
    return main
