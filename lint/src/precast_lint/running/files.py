"""Search for the files to check, and reading of them.

Invariants: folders that are links are not entered, so loops end; a file that cannot be read becomes a note,
not an error; the files are sorted, so two runs report in the same order.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from precast_lint.selecting.settings import LintSettings

__all__ = ["find", "read"]

_SUFFIXES = (".py", ".pyi", ".ipynb")
_LEFT_OUT = {
    "__pycache__",
    "__pypackages__",
    "node_modules",
    "site-packages",
    "venv",
    "build",
    "dist",
}
_LARGEST = 10 * 2**20


def find(paths: Iterable[Path], settings: LintSettings) -> Iterator[Path]:
    """Yield the given files, and those in the given folders, each once."""
    visited: set[Path] = set()
    for path in paths:
        for file in _inside(path, settings) if path.is_dir() else [path]:
            if file not in visited:
                visited.add(file)
                yield file


def _inside(folder: Path, settings: LintSettings) -> Iterator[Path]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        yield folder  # reading it reports the reason
        return
    for entry in entries:
        path = Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            hidden = entry.name in _LEFT_OUT or entry.name.startswith(".")
            if not hidden and not settings.excludes(path):
                yield from _inside(path, settings)
        elif not entry.name.endswith(_SUFFIXES) or settings.excludes(path):
            continue
        elif not (entry.is_symlink() and path.is_dir()):
            yield path


def read(path: Path) -> bytes:
    """The bytes of a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a regular file, or too large for a program.
    """
    result = os.stat(path)
    if not stat.S_ISREG(result.st_mode):
        raise ValueError("it is not a regular file")
    if result.st_size > _LARGEST:
        raise ValueError(
            f"it has {result.st_size / 2**20:.0f} MiB, and files over {_LARGEST // 2**20} are left out"
        )
    return path.read_bytes()
