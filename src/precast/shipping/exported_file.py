"""Files of exported programs: written completely or not at all, and read with one clear error.

Invariants:

- an existing file stays until the new one is complete;
- only archives of PyTorch's are replaced, so a wrong name destroys nothing;
- a file names the policy that it was exported with;
- a file of another version, or one with any damage, raises one error; PyTorch's log messages are suppressed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from precast._internal.atomic_write import is_no_file
from precast._internal.version import __version__
from precast.errors import ExportError, OutputError, PrecastError
from precast.policy.policy import Policy

__all__ = [
    "check_replaceable",
    "policy_facts",
    "read",
    "replace_by",
    "temporary_folder",
    "without_deprecations",
    "write",
]

_FACTS = "precast.json"


def write(program: torch.export.ExportedProgram, path: Path, policy: Policy) -> None:
    """Write a program to a file that `torch.export.load` reads, and that names its policy.

    Raises:
        OutputError: it could not be written, or the path is a file of another kind.
    """
    facts = {
        "precast": __version__,
        "torch": torch.__version__,
        "policy": policy.name,
        "fingerprint": policy.fingerprint,
    }
    extra = {_FACTS: json.dumps(facts)}
    replace_by(path, lambda name: torch.export.save(program, name, extra_files=extra), ".pt2")


def read(path: Path) -> torch.export.ExportedProgram:
    """Return the program in a file.

    Raises:
        ExportError: there is no such file, or no program can be read from it; the message has the reason.
    """
    if not path.is_file():
        raise ExportError(f"{path}: there is no such file")
    if not zipfile.is_zipfile(path):
        raise ExportError(
            f"{path} is not an exported program, or only a part of one: it does not end like an archive. "
            "`precast export` and `torch.export.save` write such files"
        )
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    if any("aotinductor" in name and name.endswith(".so") for name in names):
        raise ExportError(
            f"{path} is a compiled package, which has no graph to read; pass the program it was compiled from"
        )
    torch_version = policy_facts(path).get("torch")
    try:
        with _captured_errors() as errors:
            return torch.export.load(path)
    except Exception as error:
        cause = errors[0] if errors else error
        first = str(cause).strip().partition("\n")[0].rstrip(".") or type(cause).__name__
        by = (
            f"PyTorch {torch_version} has written it"
            if torch_version
            else "It does not name the version that has written it"
        )
        raise ExportError(
            f"{path}: PyTorch {torch.__version__} cannot read this program: {first}. {by}; a program of another "
            "version has to be exported again with this one"
        ) from error


_MARKS = ("archive_format", "archive_version", "data.pkl")
"""Parts of the archives of `torch.export`, of AOTInductor and of `torch.save`."""


@contextlib.contextmanager
def without_deprecations() -> Iterator[None]:
    """Suppress PyTorch's warning about a deprecated function that its exporter uses (2.13)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`isinstance\(treespec", FutureWarning)
        yield


@contextlib.contextmanager
def _captured_errors() -> Iterator[list[BaseException]]:
    """Yield a list that gets the errors that PyTorch would log with tracebacks; they are not logged."""
    errors: list[BaseException] = []

    def take(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            errors.append(error)
        return error is None

    logger = logging.getLogger("torch.export")
    logger.addFilter(take)
    try:
        yield errors
    finally:
        logger.removeFilter(take)


def policy_facts(path: Path) -> dict[str, Any]:
    """Return the facts in a file: its policy and versions; empty for a file of another program.

    Raises:
        ExportError: the facts are damaged.
    """
    with zipfile.ZipFile(path) as archive:
        parts = [name for name in archive.namelist() if name.endswith(_FACTS)]
        text = archive.read(parts[0]) if parts else b"{}"
    try:
        facts: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise ExportError(f"{path} is damaged: {_FACTS} in it cannot be read") from error
    return facts


def check_replaceable(path: Path) -> None:
    """Raise an error for a path that cannot or must not be written, before the program is exported.

    Raises:
        OutputError: the path is a folder, a device, a read-only file or one without a model; or its folder does not
            exist or is read-only.
    """
    if path.is_dir():
        raise OutputError(errno.EISDIR, "there is a folder of that name", str(path))
    if is_no_file(path):
        raise OutputError(errno.ENODEV, "there is a device or a pipe of that name", str(path))
    if path.is_file() and path.stat().st_size and not _is_model(path):
        raise OutputError(
            errno.EEXIST, "there is a file that is not a model, which is not overwritten", str(path)
        )
    if path.is_file() and not path.stat().st_mode & 0o222:
        raise OutputError(errno.EEXIST, "the file is read-only", str(path))
    with temporary_folder(path):  # raises where its folder does not exist or is read-only
        pass


def replace_by(path: Path, save: Callable[[str], Any], suffix: str) -> None:
    """Let `save` write a temporary file, whose name ends in `suffix`, and move it to `path` in one step.

    Raises:
        OutputError: it could not be written.
    """
    check_replaceable(path)
    with temporary_folder(path) as (folder, target):
        temporary = folder / f"model{suffix}"
        save(str(temporary))
        temporary.replace(target)


@contextlib.contextmanager
def temporary_folder(path: Path) -> Iterator[tuple[Path, Path]]:
    """Yield a temporary folder for files, and the final path, with links resolved.

    Raises:
        OutputError: an `OSError` was raised in the block.
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
    """Return True if PyTorch has written an archive, or the name ends in ".onnx": ONNX files have no signature."""
    if not zipfile.is_zipfile(path):
        return path.suffix == ".onnx"
    with zipfile.ZipFile(path) as archive:
        return any(name.rpartition("/")[2] in _MARKS for name in archive.namelist())
