"""The search for files to check, and their content.

Invariants: links to folders are not followed, so the search ends; files are sorted, so the order of reports is always
the same.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from precast_lint.selecting.settings import LintSettings

__all__ = ["find", "read"]

_SUFFIXES = (".py", ".pyi", ".ipynb")
_EXCLUDED_FOLDERS = {
    "__pycache__",
    "__pypackages__",
    "node_modules",
    "site-packages",
    "venv",
    "build",
    "dist",
}
_MAX_BYTES = 10 * 2**20


def find(paths: Iterable[Path], settings: LintSettings) -> Iterator[Path]:
    """Yield the files among `paths` and the files in the folders among them, each once."""
    visited: set[Path] = set()
    for path in paths:
        for file in _files_in(path, settings) if path.is_dir() else [path]:
            if file not in visited:
                visited.add(file)
                yield file


def _files_in(folder: Path, settings: LintSettings) -> Iterator[Path]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        yield folder  # `read` then raises the error
        return
    for entry in entries:
        path = Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            is_excluded = entry.name in _EXCLUDED_FOLDERS or entry.name.startswith(".")
            if not is_excluded and not settings.excludes(path):
                yield from _files_in(path, settings)
        elif not entry.name.endswith(_SUFFIXES) or settings.excludes(path):
            continue
        elif not (entry.is_symlink() and path.is_dir()):
            yield path


def read(path: Path) -> bytes:
    """Return the bytes of a file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a regular file, or larger than 10 MiB.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is not a regular file")
    if status.st_size > _MAX_BYTES:
        raise ValueError(
            f"it has {status.st_size / 2**20:.0f} MiB; the limit is {_MAX_BYTES // 2**20} MiB"
        )
    return path.read_bytes()
