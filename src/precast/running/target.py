"""The program to run, a script or a module, as `__main__`.

Invariants: the program has the `__main__` module, `sys.argv`, `sys.path[0]`, line numbers and source that it has under
Python itself. It stays `__main__` until the process ends, because pickles, spawned processes and exit functions look
for it there. Nothing here imports torch.
"""

from __future__ import annotations

import builtins
import difflib
import itertools
import os
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import BuiltinImporter, SourceFileLoader, SourcelessFileLoader
from pkgutil import get_importer
from runpy import _run_module_as_main  # type: ignore[attr-defined]
from types import CodeType, ModuleType
from typing import Any, Final

__all__ = ["Target", "command_for"]

_PYTHON: Final = re.compile(r"(python|pypy)[0-9.]*(\.exe)?", re.IGNORECASE)
_LAUNCHERS: Final = {
    "accelerate": "accelerate launch -m precast run SCRIPT",
    "torchrun": "torchrun ... -m precast run SCRIPT",
}
_OPTIONS: Final = {
    "--health": None,
    "--open": None,
    "--steps": re.compile(r"\d+:\d+"),
    "--policy": re.compile(r"(torch|default|lean)(@[\d.]+)?|.*\.toml"),
    "--report": re.compile(r".*\.html?"),
    "--json": re.compile(r".*\.json"),
}
"""Options of `precast run`, with patterns of their values."""


@dataclass(frozen=True)
class Target:
    """A program and its arguments.

    Attributes:
        name: the path of a script, of a folder or archive with a `__main__.py`; "-" for stdin; or the name of a module.
        is_module: `name` is the name of a module, as after `python -m`.
        arguments: the program's `sys.argv[1:]`.
    """

    name: str
    is_module: bool
    arguments: tuple[str, ...] = ()

    def check(self) -> None:
        """Check that the script exists. A module is looked up when it runs, as that can run code.

        Raises:
            ValueError: there is no such script; the message suggests a command.
        """
        exists = os.path.exists(self.name)
        if self.is_module and exists and self.name.endswith(".py"):
            command = command_for(self.name, *self.arguments)
            raise ValueError(f"-m expects a module, and {self.name} is a file; write `{command}`")
        if not (self.is_module or self.is_stdin or exists):
            raise ValueError(f"there is no script {self.name!r}{self._suggestion()}")

    def _suggestion(self) -> str:
        """Return the end of an error about a script that does not exist."""
        program = os.path.basename(self.name)
        if _PYTHON.fullmatch(program):
            command = command_for(self.name, *self.arguments)
            return f"; `precast run` starts Python itself: write `{command}`"
        if program in _LAUNCHERS:
            return f"; start precast in each process instead: `{_LAUNCHERS[program]}`"
        near = _near(self.name)
        if near:
            return f"; did you mean {' or '.join(near)}?"
        parts = self.name.split(".")
        if self.name.endswith(".py") or not all(map(str.isidentifier, parts)):
            return f" in {os.path.abspath(os.path.dirname(self.name))}"
        return f"; to run a module, write `{command_for('-m', self.name, *self.arguments)}`"

    def misplaced_option(self, *, is_rejected: bool) -> str | None:
        """Return a sentence on an option of `precast run` that stands after the script's name; else None.

        Args:
            is_rejected: the script ended with the exit code of an unknown option. Otherwise only an option whose value
                fits `precast run` counts, as the script may have an option of the same name.
        """
        for position, argument in enumerate(self.arguments):
            name, equals, value = argument.partition("=")
            following = self.arguments[position + 1 : position + 2]
            value = value if equals else "".join(following)
            if name not in _OPTIONS:
                continue
            pattern = _OPTIONS[name]
            if pattern is not None and not is_rejected and not pattern.fullmatch(value):
                continue
            words = [argument] if equals or pattern is None else [argument, *following]
            rest = (*self.arguments[:position], *self.arguments[position + len(words) :])
            program = ["-m", self.name] if self.is_module else [self.name]
            return (
                f"{name} stands after {self.name}, so the script received it; for precast, write: "
                f"{command_for(*words, *program, *rest)}"
            )
        return None

    @property
    def is_stdin(self) -> bool:
        """True if the program is read from stdin."""
        return self.name == "-" and not self.is_module

    @property
    def command(self) -> list[str]:
        """The words after `python` that run this program."""
        return [*(["-m"] if self.is_module else []), self.name, *self.arguments]

    def run(self, starts: Callable[[], None] = lambda: None) -> None:
        """Run the program as `__main__`. Its exceptions are raised here.

        Args:
            starts: called when `sys.path` is the program's, before its first import.
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
            is_bytecode = path.endswith(".pyc")
            loader = (SourcelessFileLoader if is_bytecode else SourceFileLoader)("__main__", path)
            # The source is compiled here: `get_code` would leave a compiled copy of the script beside it.
            code = loader.get_code("__main__") if is_bytecode else loader.get_data(path)
            _run(code, loader, path)


def command_for(*words: str) -> str:
    """Return the `precast run` command for the words of a `python` command; "python" itself may be left out."""
    if words and _PYTHON.fullmatch(os.path.basename(words[0])):
        python, *words_after = words
        options = [*itertools.takewhile(_is_option_of_python, words_after)]
        words = tuple(words_after[len(options) :])
        if options:
            return shlex.join([python, *options, "-m", "precast", "run", *(words or ("SCRIPT",))])
    return shlex.join(["precast", "run", *(words or ("SCRIPT",))])


def _is_option_of_python(word: str) -> bool:
    return word.startswith("-") and word not in {"-", "-m"}


def _near(name: str) -> list[str]:
    """Return scripts and modules whose paths resemble `name`."""
    folder, file = os.path.split(name)
    module = name.replace(".", os.sep)
    if os.sep not in name and (os.path.isfile(f"{module}.py") or os.path.isdir(module)):
        return [shlex.join(["precast", "run", "-m", name])] if "." in name else [f"{name}.py"]
    try:
        entries = os.listdir(folder or os.curdir)
    except OSError:
        return []
    scripts = [entry.removesuffix(".py") for entry in entries if entry.endswith(".py")]
    near = difflib.get_close_matches(file.removesuffix(".py"), scripts, n=2)
    return [os.path.join(folder, f"{script}.py") for script in near]


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
