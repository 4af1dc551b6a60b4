"""A script or module that is run as `__main__`.

Invariants: the program has the same `__main__` module, `sys.argv`, `sys.path[0]`, line numbers and source as under
`python`. Its module stays `__main__` until the process ends: pickles, spawned processes and exit functions look it up.
Nothing here imports torch.
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
    """A module's name, "-" for stdin, or the path of a script or of a folder or archive with a `__main__.py`."""
    is_module: bool
    arguments: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise a `ValueError` if the script does not exist. A module is not looked up here, as that may run code."""
        exists = os.path.exists(self.name)
        if self.is_module and exists and self.name.endswith(".py"):
            raise ValueError(f"-m expects a module, got the file {self.name}; omit -m")
        if self.is_module or self.is_stdin or exists:
            return
        file, hint = Path(self.name), "; pass the script without python"
        if not file.name.startswith("python"):
            scripts = [str(each) for each in file.parent.glob("*.py")]
            hint = f" in {file.parent.absolute()}{nearest(self.name, scripts)}"
            if file.suffix != ".py" and "." in self.name:
                hint = "; use -m for a module"
        raise ValueError(f"no script {self.name!r}{hint}")

    @property
    def is_stdin(self) -> bool:
        """True if the program is read from stdin."""
        return self.name == "-" and not self.is_module

    @property
    def command(self) -> list[str]:
        """The arguments of `python` that run this program."""
        return [*(["-m"] if self.is_module else []), self.name, *self.arguments]

    def run(self, on_start: Callable[[], None] = lambda: None) -> None:
        """Run the program as `__main__`. `on_start` is called when `sys.path` is set, before its first import."""
        sys.argv[:] = [self.name, *self.arguments]
        path = os.path.abspath(self.name)
        if self.is_module:
            sys.argv[0] = "-m"  # as under Python, while its packages are imported
            _run_with_runpy(os.getcwd(), self.name, on_start)
        elif self.is_stdin:
            _set_first_path("", on_start)
            _run_source(sys.stdin.buffer.read(), BuiltinImporter, "<stdin>")
        elif get_importer(path) is not None:  # a folder or an archive
            _run_with_runpy(path, "__main__", on_start)
        else:
            _set_first_path(os.path.dirname(os.path.realpath(path)), on_start)
            is_bytecode = path.endswith(".pyc")
            loader = (SourcelessFileLoader if is_bytecode else SourceFileLoader)("__main__", path)
            # The source is compiled here, because `get_code` would write a `.pyc` file of the script.
            code = loader.get_code("__main__") if is_bytecode else loader.get_data(path)
            _run_source(code, loader, path)


def _set_first_path(folder: str, on_start: Callable[[], None]) -> None:
    """Replace the folder of `precast` in `sys.path` by `folder`, unless Python runs with ``-P``; call `on_start`."""
    if not sys.flags.safe_path:
        sys.path[0] = folder
    on_start()


def _run_with_runpy(folder: str, name: str, on_start: Callable[[], None]) -> None:
    """Run a module, or the `__main__` of a folder or an archive, by the function that Python uses for it."""
    is_container = name == "__main__"
    if is_container and sys.flags.safe_path:
        sys.path.insert(0, folder)  # the function finds the program in `sys.path` only
    _set_first_path(folder, on_start)
    _new_main()
    _run_module_as_main(name, alter_argv=not is_container)


def _run_source(source: bytes | CodeType | None, loader: Any, path: str) -> None:
    assert source is not None  # loaders raise ImportError for unreadable code
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
