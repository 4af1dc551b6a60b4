"""Files of exported programs: written completely or not at all, and read with one clear error.

Invariants:

- a file that is there stays until the new one is complete;
- only an archive of PyTorch's is ever replaced, so that a wrong name destroys nothing;
- a file says the policy that it was exported with; what it computes it says itself.
"""

from __future__ import annotations

import errno
import json
import os
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from precast._internal.version import __version__
from precast.errors import ExportError, OutputError
from precast.policy.policy import Policy

__all__ = ["check_replaceable", "read", "replace_by", "said_of", "write"]

_FACTS = "precast.json"


def write(program: torch.export.ExportedProgram, path: Path, policy: Policy) -> None:
    """Writes a program to a file that `torch.export.load` reads.

    Args:
        program: what `precast.export` returned.
        path: of the file.
        policy: the policy of the program, to be named in the file.

    Raises:
        OutputError: it could not be written, or another kind of file is there.
    """
    facts = {"precast": __version__, "policy": policy.name, "fingerprint": policy.fingerprint}
    extra = {_FACTS: json.dumps(facts)}
    replace_by(path, lambda name: torch.export.save(program, name, extra_files=extra), ".pt2")


def read(path: Path) -> torch.export.ExportedProgram:
    """The program in a file.

    Raises:
        ExportError: there is no such file, or no program can be read from it; says why.
    """
    if not path.is_file():
        raise ExportError(f"{path}: there is no such file")
    if not zipfile.is_zipfile(path):
        raise ExportError(
            f"{path} is no exported program, or only a part of one: it does not end as an archive does. "
            "`precast export` and `torch.export.save` write such files"
        )
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    if any("aotinductor" in name and name.endswith(".so") for name in names):
        raise ExportError(
            f"{path} is a compiled package, which has no graph to read; name the program it was compiled from"
        )
    try:
        return torch.export.load(path)
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise ExportError(
            f"{path}: PyTorch {torch.__version__} cannot read this program: {first or type(error).__name__}. A file "
            "that another version has written has to be exported again with this one"
        ) from error


def said_of(path: Path) -> dict[str, Any]:
    """What a file says of itself; empty for one that precast has not written."""
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name.endswith(_FACTS):
                found: dict[str, Any] = json.loads(archive.read(name))
                return found
    return {}


def check_replaceable(path: Path) -> None:
    """Refuses a place for a file at which there is something else, before time is spent on it.

    Raises:
        OutputError: there is a folder, or a file that no model was written to.
    """
    if path.is_dir():
        raise OutputError(errno.EISDIR, "there is a folder of that name", str(path))
    if path.is_file() and path.stat().st_size and not _is_model(path):
        raise OutputError(
            errno.EEXIST, "there is a file that is no model, and none is written over it", str(path)
        )
    if not path.parent.is_dir():
        raise OutputError(errno.ENOENT, "there is no such folder", str(path.parent))


def replace_by(path: Path, save: Callable[[str], Any], suffix: str) -> None:
    """Has a file written beside its place, and then puts it there in one step.

    Args:
        path: where the file is to be.
        save: writes it to the name that it is given.
        suffix: how that name ends.

    Raises:
        OutputError: it could not be written.
    """
    check_replaceable(path)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
            written = Path(folder) / f"model{suffix}"
            save(str(written))
            os.replace(written, path)
    except OSError as error:
        raise OutputError(error.errno, error.strerror or str(error), str(path)) from error


def _is_model(path: Path) -> bool:
    return zipfile.is_zipfile(path) or path.suffix == ".onnx"
