"""Atomic writes of files: a reader never sees half of one.

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

__all__ = ["is_no_file", "is_not_ours", "refusal", "replace", "replace_own"]

_HEAD = 4096  # bytes
_MARKS = (
    (b'{"schema":', b'"precast":'),
    (b"<!doctype html>", b'<meta name="generator" content="precast'),
    (b"\x89PNG", b"precast"),
    (b"# Found by precast.tune for ", b""),
    (b"{", b'"schema": "precast.tuning/'),
)
"""The first bytes of files that precast writes, and a text near their beginning."""


_NOT_OURS = "there is a file that precast did not write, and precast does not overwrite it"


def is_not_ours(path: Path) -> bool:
    """Return True for a file that is not empty and that precast did not write, such as a script or other results."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        head = file.read(_HEAD)
    return bool(head) and not any(head.startswith(a) and b in head for a, b in _MARKS)


def replace_own(path: Path, content: bytes) -> None:
    """Replace a file as `replace` does, but only one that precast wrote."""
    try:
        foreign = is_not_ours(path)
    except OSError as unread:
        raise OutputError(unread.errno, unread.strerror or str(unread), str(path)) from unread
    if foreign:
        raise OutputError(errno.EEXIST, _NOT_OURS, str(path))
    replace(path, content)


def refusal(path: Path, option: str) -> str:
    """Return the error of a command whose option names a file that precast did not write; empty for other files."""
    if not is_not_ours(path):
        return ""
    return f"cannot write {path}: {_NOT_OURS}. Nothing was run; name another file with {option}"


def replace(path: Path, content: bytes, mode: int = 0o644, *, make_folders: bool = True) -> None:
    """Write `content` to `path` in one step. Links are followed; devices and pipes are written to.

    Raises:
        OutputError: it could not be written: a full disk, a folder that is read-only or a file, an invalid path.
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
        raise NotADirectoryError(errno.ENOTDIR, f"{folder} is no folder") from error


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
