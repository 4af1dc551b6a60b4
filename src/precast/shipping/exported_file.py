"""Files of exported programs: written completely or not at all, and read with one clear error.

Invariants:

- a file that is there stays until the new one is complete;
- only an archive of PyTorch's is ever replaced, so that a wrong name destroys nothing;
- a file says the policy that it was exported with; what it computes it says itself;
- a file of another version, or one that is damaged anywhere, is one error that says so; nothing is logged beside it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from precast._internal.atomic_write import is_no_file
from precast._internal.version import __version__
from precast.errors import ExportError, OutputError, PrecastError
from precast.policy.policy import Policy

__all__ = ["check_replaceable", "folder_beside", "read", "replace_by", "said_of", "write"]

_FACTS = "precast.json"
_SAID = {"precast", "policy", "fingerprint"}
_FORMAT = 1
"""What the facts in a file are written in; a higher number is that of a later precast."""


def write(program: torch.export.ExportedProgram, path: Path, policy: Policy) -> None:
    """Writes a program to a file that `torch.export.load` reads.

    Args:
        program: what `precast.export` returned.
        path: of the file.
        policy: the policy of the program, to be named in the file.

    Raises:
        OutputError: it could not be written, or another kind of file is there.
    """
    facts = {
        "format": _FORMAT,
        "precast": __version__,
        "torch": torch.__version__,
        "policy": policy.name,
        "fingerprint": policy.fingerprint,
    }
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
        damaged = _damaged(archive)
    if damaged is not None:
        raise ExportError(f"{path} is damaged: {damaged} in it cannot be read. Copy it again")
    if any("aotinductor" in name and name.endswith(".so") for name in names):
        raise ExportError(
            f"{path} is a compiled package, which has no graph to read; name the program it was compiled from"
        )
    writer = said_of(path).get("torch")
    try:
        with _logged_errors() as logged:
            return torch.export.load(path)
    except Exception as error:
        cause = logged[0] if logged else error
        first = str(cause).strip().partition("\n")[0].rstrip(".") or type(cause).__name__
        by = (
            f"PyTorch {writer} has written it" if writer else "It does not say which has written it"
        )
        raise ExportError(
            f"{path}: PyTorch {torch.__version__} cannot read this program: {first}. {by}; a program that another "
            "version has written has to be exported again with this one"
        ) from error


def _damaged(archive: zipfile.ZipFile) -> str | None:
    """The name of what is not as it was written; None where all is. PyTorch does not look at checksums."""
    for name in archive.namelist():
        try:
            with archive.open(name) as part:
                while part.read(_AT_ONCE):
                    pass
        except (zipfile.BadZipFile, EOFError, OSError, NotImplementedError, zlib.error):
            return name
    return None


_AT_ONCE = 1 << 22  # bytes
_MARKS = ("archive_format", "archive_version", "data.pkl")
"""Parts that archives of `torch.export`, of AOTInductor and of `torch.save` have."""


@contextlib.contextmanager
def _logged_errors() -> Iterator[list[BaseException]]:
    """The errors that PyTorch would log with their tracebacks, in the place of the log."""
    found: list[BaseException] = []

    def take(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            found.append(error)
        return error is None

    logger = logging.getLogger("torch.export")
    logger.addFilter(take)
    try:
        yield found
    finally:
        logger.removeFilter(take)


def said_of(path: Path) -> dict[str, Any]:
    """What a file says of itself; empty for one that precast has not written.

    Raises:
        ExportError: it is damaged, or a later precast has written it.
    """
    with zipfile.ZipFile(path) as archive:
        parts = [name for name in archive.namelist() if name.endswith(_FACTS)]
        text = archive.read(parts[0]) if parts else b"{}"
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict) or (parts and not found.keys() >= _SAID):
        raise ExportError(f"{path} is damaged: {_FACTS} in it is not what precast writes")
    written = found.pop("format", _FORMAT)
    if not isinstance(written, int) or written > _FORMAT:
        raise ExportError(
            f"{path} is written in format {written} by precast {found.get('precast', '?')}; precast {__version__} "
            f"knows formats up to {_FORMAT}. Export it again, or read it with that version"
        )
    return found


def check_replaceable(path: Path) -> None:
    """Refuses a place where no file can or may be written, before time is spent on it.

    Raises:
        OutputError: there is a folder, a device, a file that no model was written to or that is read-only; or the
            place is in no folder, or in one that may not be written to.
    """
    folder = Path(os.path.realpath(path)).parent
    if path.is_dir():
        raise OutputError(errno.EISDIR, "there is a folder of that name", str(path))
    if is_no_file(path):
        raise OutputError(errno.ENODEV, "there is a device or a pipe of that name", str(path))
    if path.is_file() and path.stat().st_size and not _is_model(path):
        raise OutputError(
            errno.EEXIST, "there is a file that is no model, and none is written over it", str(path)
        )
    if path.is_file() and not path.stat().st_mode & 0o222:
        raise OutputError(errno.EEXIST, "there is a file that is read-only", str(path))
    if not folder.is_dir():
        number = errno.ENOTDIR if folder.exists() else errno.ENOENT
        raise OutputError(number, f"there is no folder {folder}", str(path))
    if not os.access(folder, os.W_OK):
        raise OutputError(errno.EACCES, f"the folder {folder} is read-only", str(path))


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
    with folder_beside(path) as (folder, target):
        written = folder / f"model{suffix}"
        save(str(written))
        written.replace(target)


@contextlib.contextmanager
def folder_beside(path: Path) -> Iterator[tuple[Path, Path]]:
    """A folder for files that are written, and the place of the whole file, to which a link of that name leads.

    Raises:
        OutputError: an `OSError` was raised inside.
    """
    target = Path(os.path.realpath(path))
    try:
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
            yield Path(folder), target
    except PrecastError:
        raise
    except OSError as error:
        raise OutputError(error.errno, error.strerror or str(error), str(path)) from error


def _is_model(path: Path) -> bool:
    """Whether PyTorch has written an archive, or the name says ONNX, whose files have no mark."""
    if not zipfile.is_zipfile(path):
        return path.suffix == ".onnx"
    with zipfile.ZipFile(path) as archive:
        return any(name.rpartition("/")[2] in _MARKS for name in archive.namelist())
