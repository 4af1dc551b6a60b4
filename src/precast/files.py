"""Writing results so that a reader never meets half a file.

Invariants: what was at a path stays until its successor is complete and on the disk; a failure is one
`OutputError` that says so, and leaves no temporary file. A process that is killed while it writes leaves the
old file and, beside it, a hidden temporary one. A device or a pipe is written to, and stays what it is.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from precast.errors import OutputError

__all__ = ["is_no_file", "replace"]


def replace(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Puts `content` at `path` in one step; a link is followed, and missing folders are made. A device gets it written.

    Raises:
        OutputError: it could not be written: a full disk, a folder that is read-only or a file.
    """
    target = Path(os.path.realpath(path))
    try:
        if is_no_file(path):
            path.write_bytes(content)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        _replace(target, content, mode)
    except OSError as error:
        raise OutputError(error.errno, error.strerror or str(error), str(path)) from error


def is_no_file(path: Path) -> bool:
    """Whether there is a device or a pipe, such as ``/dev/null``, in whose place no file may be put."""
    return path.exists() and not (path.is_file() or path.is_dir())


def _replace(path: Path, content: bytes, mode: int) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # or a crash may leave the new name with nothing behind it
        os.chmod(name, mode)  # mkstemp's files are for their owner alone
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
