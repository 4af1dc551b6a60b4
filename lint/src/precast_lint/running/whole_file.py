"""Writes a file in one step, so that a reader, or a crash, never leaves half of one.

precast has such a function as well, and its reports need more of it. The two distributions share no code: a third one
for these lines would be one more package that every user installs.

Invariants: what was at a path stays until its successor is complete and on the disk; a failure raises `OSError` and
leaves no temporary file. A device or a pipe is written to, and stays what it is.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

__all__ = ["write"]


def write(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write `content` to `path`; links are followed, and missing folders are created.

    Raises:
        OSError: it cannot be written; what was there before is unchanged.
    """
    target = path.resolve()
    if target.exists() and not (target.is_file() or target.is_dir()):
        target.write_bytes(content)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # or a crash may leave the new name with nothing behind it
        os.chmod(name, mode)  # mkstemp's files are for their owner alone
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise
