"""What is run, a script or a module, and how it becomes `__main__`.

Invariants: the program finds what Python itself would have given it: `__main__` with its attributes, `sys.argv`,
`sys.path[0]`, line numbers and source; and `__main__` stays it until the process ends, for pickles, for processes that
are spawned, and for what runs at exit. Nothing here imports torch.
"""

from __future__ import annotations

import builtins
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import BuiltinImporter, ModuleSpec, SourceFileLoader, SourcelessFileLoader
from pkgutil import get_importer
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
            starts: called when `sys.path` is the program's, before anything of it is imported or run.
        """
        if self.is_module:
            _first_in_path(os.getcwd())
            starts()
            main, code = self._as_module()
        elif self.is_stdin:
            _first_in_path("")
            starts()
            main, code = self._as_stdin()
        else:
            main, code = self._as_script(starts)
        exec(code, vars(main))

    def _as_stdin(self) -> tuple[ModuleType, CodeType]:
        sys.argv[:] = [self.name, *self.arguments]
        main = _new_main(BuiltinImporter, "<stdin>")
        return main, compile(sys.stdin.buffer.read(), "<stdin>", "exec", dont_inherit=True)

    def _as_script(self, starts: Callable[[], None]) -> tuple[ModuleType, CodeType]:
        path = os.path.abspath(self.name)
        sys.argv[:] = [self.name, *self.arguments]
        importer: Any = get_importer(path)  # of a folder or an archive
        if importer is not None:
            _first_in_path(path)
            starts()
            spec = importer.find_spec("__main__")
            if spec is None:
                sys.exit(f"{sys.executable}: can't find '__main__' module in {path!r}")
            return _main_of(spec)
        _first_in_path(os.path.dirname(os.path.realpath(path)))
        starts()
        if path.endswith(".pyc"):
            compiled = SourcelessFileLoader("__main__", path)
            code = compiled.get_code("__main__")
            assert code is not None  # unreadable code is an ImportError
            return _new_main(compiled, path), code
        loader = SourceFileLoader("__main__", path)
        # Not `get_code`, which would leave a compiled copy of the script beside it.
        code = compile(loader.get_data(path), path, "exec", dont_inherit=True)
        return _new_main(loader, path), code

    def _as_module(self) -> tuple[ModuleType, CodeType]:
        sys.argv[:] = ["-m", *self.arguments]  # while its packages are imported
        spec = _spec_of(self.name)
        sys.argv[0] = str(spec.origin)
        return _main_of(spec)


def _first_in_path(folder: str) -> None:
    """Puts `folder` where Python has put that of the command `precast`, unless it was asked for no such entry."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _spec_of(name: str) -> ModuleSpec:
    """Where a module is, or a package's `__main__`; ends the program with Python's words where there is none."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(f"{error.name}."):
            raise
        spec = None
    if spec is None:
        sys.exit(f"{sys.executable}: No module named {name}")
    if spec.submodule_search_locations is None:
        return spec
    inner = importlib.util.find_spec(f"{name}.__main__")
    if inner is None:
        because = f"{name!r} is a package and cannot be directly executed"
        sys.exit(f"{sys.executable}: No module named {name}.__main__; {because}")
    return inner


def _main_of(spec: ModuleSpec) -> tuple[ModuleType, CodeType]:
    loader: Any = spec.loader
    code = loader.get_code(spec.name)
    if code is None:
        sys.exit(f"{sys.executable}: No code object available for {spec.name}")
    main = _new_main(loader, str(spec.origin))
    vars(main).update(__spec__=spec, __package__=spec.parent, __cached__=spec.cached)
    return main, code


def _new_main(loader: Any, path: str) -> ModuleType:
    """A fresh `__main__`, with what Python puts there before the first line of a script runs."""
    main = ModuleType("__main__")
    main.__file__, main.__loader__ = path, loader
    vars(main).update(__builtins__=builtins, __annotations__={}, __cached__=None)
    sys.modules["__main__"] = main
    return main
