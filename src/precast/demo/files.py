"""Writing results so that a reader never meets half a file."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

__all__ = ["replace"]


def replace(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Puts `content` at `path` in one step: what was there before stays until it is complete."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(name, mode)  # mkstemp's files are for their owner alone
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
