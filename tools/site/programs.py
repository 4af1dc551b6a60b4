"""The programs of `examples/` for the site: their text, and what they print when they are run.

Invariants:
    - Each call, a program and its arguments, runs once, in a process of its own, side by side.
    - What was printed is kept by the contents of all that it can depend on: programs, package, versions.
    - A program that fails is a `PageError`.
"""

from __future__ import annotations

import ast
import hashlib
import os
import runpy
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

from tools.site.apart import printed_apart
from tools.site.directives import PageError

__all__ = ["Call", "Programs"]

Call = tuple[str, ...]
"""A program's name and its arguments."""


class Programs:
    """The programs of a project.

    Args:
        root: the project's folder.
        cache: where results are kept between builds.

    Attributes:
        numbered: the files of the course, in its order.
    """

    def __init__(self, root: Path, cache: Path) -> None:
        self.root = root
        self.folder = root / "examples"
        self._cache = cache
        self.numbered = sorted(self.folder.glob("[0-9]*.py"))
        self._printed: dict[Call, str | PageError] = {}

    def path(self, name: str) -> Path:
        """The file of a program.

        Raises:
            PageError: there is none of that name.
        """
        path = self.folder / name
        if Path(name).name != name or not path.is_file():
            there = ", ".join(each.name for each in self.numbered)
            raise PageError(f"there is no program examples/{name}; there are {there}")
        return path

    def text(self, name: str, part: str | None = None) -> str:
        """A program's text, or that of one function, class or constant of it.

        Raises:
            PageError: there is no such program, or no such part.
        """
        text = self.path(name).read_text(encoding="utf-8")
        return text.strip("\n") if part is None else _part(text, name, part)

    def output(self, call: Call) -> str:
        """Return the output of a call; it runs now if `run` did not run it.

        Raises:
            PageError: there is no such program, or it failed.
        """
        self.path(call[0])
        self.run([call])
        printed = self._printed[call]
        if isinstance(printed, PageError):
            raise printed
        return printed

    def run(self, calls: Iterable[Call]) -> None:
        """Runs all calls that are not known yet, side by side."""
        todo = [call for call in dict.fromkeys(calls) if call not in self._printed]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            self._printed.update(zip(todo, pool.map(self._run, todo), strict=True))

    def kept(self, *words: str) -> Path:
        """The path, in the cache, of what depends on these words and on all that programs depend on."""
        return (
            self._cache / hashlib.sha256("\0".join([self._contents, *words]).encode()).hexdigest()
        )

    def _run(self, call: Call) -> str | PageError:
        kept = self.kept("output", *call)
        if kept.exists():
            return kept.read_text(encoding="utf-8")
        name = f"python examples/{' '.join(call)}"
        try:
            printed = printed_apart(name, self.root, _run_program, call)
        except PageError as problem:
            return problem
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(printed, encoding="utf-8")
        return printed

    @cached_property
    def _contents(self) -> str:
        """A name for all that what a program prints can depend on."""
        digest = hashlib.sha256(f"{sys.version} {version('torch')}".encode())
        for folder in (self.folder, self.root / "src", self.root / "lint" / "src"):
            for path in sorted(folder.rglob("*")):
                if path.suffix in {".py", ".toml"}:
                    digest.update(f"\0{path.relative_to(folder)}\0".encode() + path.read_bytes())
        return digest.hexdigest()


def _run_program(call: Call) -> None:
    """Runs a program as Python runs the file that it is asked to."""
    sys.path[0] = "examples"
    sys.argv = [f"examples/{call[0]}", *call[1:]]
    runpy.run_path(sys.argv[0], run_name="__main__")


def _part(text: str, program: str, name: str) -> str:
    parts: dict[str, ast.stmt] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            parts[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                parts |= {n.id: node for n in ast.walk(target) if isinstance(n, ast.Name)}
    if name not in parts:
        raise PageError(f"there is no {name} in examples/{program}; there are {', '.join(parts)}")
    node = parts[name]
    first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])
