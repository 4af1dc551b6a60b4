"""The program to run, a script or a module, as `__main__`.

Invariants: the program has the `__main__` module, `sys.argv`, `sys.path[0]`, line numbers and source that it has under
Python itself. It stays `__main__` until the process ends, because pickles, spawned processes and exit functions look
for it there. Nothing here imports torch.
"""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import BuiltinImporter, SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from pkgutil import get_importer
from runpy import _run_module_as_main  # type: ignore[attr-defined]
from types import CodeType, ModuleType
from typing import Any

from precast.policy.values import nearest

__all__ = ["Target"]


@dataclass(frozen=True)
class Target:
    """A program and its arguments."""

    name: str
    """The path of a script, of a folder or archive with a `__main__.py`; "-" for stdin; or the name of a module."""
    is_module: bool
    arguments: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise a `ValueError` if there is no such script. A module is looked up when it runs, as that can run code."""
        exists = os.path.exists(self.name)
        if self.is_module and exists and self.name.endswith(".py"):
            raise ValueError(f"-m expects a module, and {self.name} is a file; leave out -m")
        if self.is_module or self.is_stdin or exists:
            return
        file, hint = Path(self.name), "; name the script alone, as it starts Python itself"
        if not file.name.startswith("python"):
            scripts = [str(each) for each in file.parent.glob("*.py")]
            hint = f" in {file.parent.absolute()}{nearest(self.name, scripts)}"
            if file.suffix != ".py" and "." in self.name:
                hint = "; write -m before the name of a module"
        raise ValueError(f"there is no script {self.name!r}{hint}")

    @property
    def is_stdin(self) -> bool:
        """True if the program is read from stdin."""
        return self.name == "-" and not self.is_module

    @property
    def command(self) -> list[str]:
        """The words after `python` that run this program."""
        return [*(["-m"] if self.is_module else []), self.name, *self.arguments]

    def run(self, starts: Callable[[], None] = lambda: None) -> None:
        """Run the program as `__main__`. `starts` is called before its first import, when `sys.path` is its own."""
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
            is_bytecode = path.endswith(".pyc")
            loader = (SourcelessFileLoader if is_bytecode else SourceFileLoader)("__main__", path)
            # The source is compiled here: `get_code` would leave a compiled copy of the script beside it.
            code = loader.get_code("__main__") if is_bytecode else loader.get_data(path)
            _run(code, loader, path)


def _first_in_path(folder: str, starts: Callable[[], None]) -> None:
    """Replace the folder of the command `precast` in `sys.path` by `folder`, unless Python runs with ``-P``."""
    if not sys.flags.safe_path:
        sys.path[0] = folder
    starts()


def _as_python_does(folder: str, name: str, starts: Callable[[], None]) -> None:
    """Run a module, or the `__main__` of a folder or an archive, with the function that Python itself uses."""
    is_container = name == "__main__"
    if is_container and sys.flags.safe_path:
        sys.path.insert(0, folder)  # the function finds the program in `sys.path` only
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
    """Return a new `__main__`, with the attributes that Python sets before the first line of a script."""
    main = ModuleType("__main__")
    vars(main).update(__builtins__=builtins, __annotations__={}, __cached__=None)
    sys.modules["__main__"] = main
    return main
