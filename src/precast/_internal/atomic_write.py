"""Atomic writes of files: a reader never sees a part of the new content.

Invariants: the old file stays until the new one is complete and on the disk. Every failure is an `OutputError`, and
leaves no temporary file. A process that is killed while it writes leaves the old file and a hidden temporary one.
Devices and pipes are written to, not replaced. A report never replaces a file that precast did not write.
"""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from precast.errors import OutputError

__all__ = ["foreign_file_error", "is_foreign", "is_no_file", "replace", "replace_own"]

_HEAD_BYTES = 4096
_SIGNATURES = (
    (b'{"schema":', b'"precast":'),
    (b"<!doctype html>", b'<meta name="generator" content="precast'),
    (b"\x89PNG", b"precast"),
    (b"# Found by precast.tune for ", b""),
    (b"{", b'"schema": "precast.tuning/'),
)
"""The first bytes of each kind of file that precast writes, and a text within its first `_HEAD_BYTES`."""

_FOREIGN_FILE = "the file exists and was not written by precast, which does not overwrite it"


def is_foreign(path: Path) -> bool:
    """Return True for a file, other than an empty one, that precast did not write."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        head = file.read(_HEAD_BYTES)
    return bool(head) and not any(head.startswith(a) and b in head for a, b in _SIGNATURES)


def replace_own(path: Path, content: bytes) -> None:
    """Replace a file as `replace` does, but only one that precast wrote."""
    try:
        is_other = is_foreign(path)
    except OSError as error:
        raise OutputError(error.errno, error.strerror or str(error), str(path)) from error
    if is_other:
        raise OutputError(errno.EEXIST, _FOREIGN_FILE, str(path))
    replace(path, content)


def foreign_file_error(path: Path, option: str) -> str:
    """Return the message of a command if its option names a file that precast did not write, else an empty text."""
    if not is_foreign(path):
        return ""
    return f"cannot write {path}: {_FOREIGN_FILE}. Nothing was run; pass another file to {option}"


def replace(path: Path, content: bytes, mode: int = 0o644, *, make_folders: bool = True) -> None:
    """Write `content` to `path` in one step. Links are followed; devices and pipes are written to.

    Raises:
        OutputError: the file cannot be written: the disk is full, the folder is read-only, the path is invalid.
    """
    try:
        target = Path(os.path.realpath(path))
        if is_no_file(path):
            path.write_bytes(content)
            return
        if make_folders:
            _make_folder(target.parent)
        _replace(target, content, mode)
    except OSError as error:
        raise OutputError(error.errno, error.strerror or str(error), str(path)) from error
    except ValueError as error:  # a path with a zero byte
        raise OutputError(errno.EINVAL, str(error), str(path)) from error


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, f"{folder} is not a folder") from error


def is_no_file(path: Path) -> bool:
    """Return True for a device or a pipe, such as ``/dev/null``, which must not be replaced by a file."""
    return path.exists() and not (path.is_file() or path.is_dir())


def _replace(path: Path, content: bytes, mode: int) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # otherwise a crash may leave an empty file under the new name
        os.chmod(name, mode)  # mkstemp's files are readable by their owner only
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
