"""Files of exported programs and compiled packages: written, read, and compared with their program.

Invariants:

- a file is written completely or not at all, and names the policy that it was exported with;
- only archives of PyTorch's are replaced, so a wrong name destroys nothing;
- a file of another version, or one with any damage, raises one error; PyTorch's log messages are suppressed;
- a file is compared as its user runs it: read from the disk, by PyTorch, AOTInductor or ONNX Runtime, without a region.
  If it does not run on this machine, the reason is reported.
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
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from precast import _torch
from precast._internal.atomic_write import is_no_file
from precast._internal.pytree import map_tensors, tensors_in
from precast._internal.version import __version__
from precast.autocast_mode.region import disable
from precast.errors import ExportError, OutputError, PrecastError
from precast.policy.policy import Policy

__all__ = [
    "FileCheck",
    "check_file",
    "check_replaceable",
    "differences",
    "policy_facts",
    "read",
    "temporary_folder",
    "without_deprecations",
    "write",
    "write_package",
]

_FACTS = "precast.json"


def write(program: torch.export.ExportedProgram, path: Path, policy: Policy) -> None:
    """Write a program to a file that `torch.export.load` reads, and that names its policy."""
    facts = {
        "precast": __version__,
        "torch": torch.__version__,
        "policy": policy.name,
        "fingerprint": policy.fingerprint,
    }
    extra = {_FACTS: json.dumps(facts)}
    _replace_by(path, lambda name: torch.export.save(program, name, extra_files=extra))


def write_package(program: torch.export.ExportedProgram, path: Path) -> None:
    """Compile a program, and write the package that `torch._inductor.aoti_load_package` loads.

    Each result that the program rounds to 16 bits is rounded in the package, also if the compiler fuses operations.
    """

    def save(name: str) -> None:
        try:
            with torch.no_grad(), without_deprecations():
                _torch.compile_package(program, name)
        except (PrecastError, OSError):
            raise
        except Exception as error:
            first = str(error).strip().partition("\n")[0]
            raise ExportError(
                f"AOTInductor cannot compile the program: {type(error).__name__}: {first}"
            ) from error

    _replace_by(path, save)


def read(path: Path) -> torch.export.ExportedProgram:
    """Return the program in a file."""
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
        by = f"PyTorch {torch_version}" if torch_version else "An unknown version of PyTorch"
        raise ExportError(
            f"{path}: PyTorch {torch.__version__} cannot read this program: {first}. {by} has written it; a program of "
            "another version has to be exported again with this one"
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
    """Return the facts in a file: its policy and versions; empty for a file of another program."""
    with zipfile.ZipFile(path) as archive:
        parts = [name for name in archive.namelist() if name.endswith(_FACTS)]
        text = archive.read(parts[0]) if parts else b"{}"
    try:
        facts: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise ExportError(f"{path} is damaged: {_FACTS} in it cannot be read") from error
    return facts


def check_replaceable(path: Path) -> None:
    """Raise an error for a path that cannot or must not be written, before the program is exported."""
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


def _replace_by(path: Path, save: Callable[[str], Any]) -> None:
    check_replaceable(path)
    with temporary_folder(path) as (folder, target):
        temporary = folder / "model.pt2"
        save(str(temporary))
        temporary.replace(target)


@contextlib.contextmanager
def temporary_folder(path: Path) -> Iterator[tuple[Path, Path]]:
    """Yield a temporary folder for files, and the final path, with links resolved."""
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


@dataclass(frozen=True)
class FileCheck:
    """Comparison of the results of a file with those of its program.

    Attributes:
        runtime: the runtime that ran the file, with its version; None where none did.
        error: the reason why there are no results to compare; None where they were compared.
        difference: the results that differ, and by how much; None where all values are equal, or nothing was compared.
    """

    runtime: str | None
    error: str | None = None
    difference: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        is_compared = self.error is None
        return {
            "checked": is_compared,
            "runtime": self.runtime,
            "error": self.error,
            "equal": self.difference is None if is_compared else None,
            "difference": self.difference,
        }

    def __str__(self) -> str:
        if self.error is not None:
            runs = f"{self.runtime} cannot run it: " if self.runtime else ""
            return f"{runs}{self.error}. The file's results were not compared with the model's"
        if self.difference is None:
            return f"run by {self.runtime}, it gives exactly the model's results on the example"
        return f"run by {self.runtime}, its results on the example differ from the model's: {self.difference}"


def check_file(
    program: torch.export.ExportedProgram,
    path: Path,
    kind: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> FileCheck:
    """Run a file ("program", "aoti" or "onnx") on the example, and compare its results with those of its program."""
    name, load = f"PyTorch {torch.__version__}", _load_program
    if kind == "aoti":
        name, load = f"AOTInductor of {name}", _torch.load_package
    elif kind == "onnx" and find_spec("onnxruntime") is None:
        return FileCheck(None, "onnxruntime is not installed (pip install onnxruntime)")
    elif kind == "onnx":
        name, load = f"onnxruntime {version('onnxruntime')} on the CPU", _load_onnx

    def results_of(run: Callable[..., Any]) -> list[Tensor]:
        own_args, own_kwargs = map_tensors((args, kwargs), torch.clone)
        with torch.random.fork_rng([]), torch.no_grad(), disable():
            torch.manual_seed(0)
            return tensors_in(run(*own_args, **own_kwargs))

    expected = results_of(program.module())
    try:
        results = results_of(load(path))
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        return FileCheck(name, f"{type(error).__name__}: {first_line}")
    return FileCheck(name, difference="; ".join(differences(expected, results)) or None)


def differences(expected: Any, actual: Any) -> Iterator[str]:
    """Yield the differences between the tensors of two results, named by their order; NaN equals NaN."""
    ours, theirs = tensors_in(expected), tensors_in(actual)
    if len(ours) != len(theirs):
        yield f"{len(theirs)} tensors instead of {len(ours)}"
        return
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        name = f"result {number}"
        if one.dtype is not other.dtype:
            yield f"{name} is {other.dtype} instead of {one.dtype}"
        elif one.shape != other.shape:
            yield f"{name} has the shape {tuple(other.shape)} instead of {tuple(one.shape)}"
        else:
            worst = _largest_distance(_real(one), _real(other))
            if worst > 0:
                yield f"{name} differs by up to {worst:.3g}"


def _largest_distance(one: Tensor, other: Tensor) -> float:
    is_equal = (one == other) | (one.isnan() & other.isnan())
    distances = (one.double() - other.double()).abs().nan_to_num(torch.inf, torch.inf)[~is_equal]
    return distances.max().item() if distances.numel() else 0.0


def _real(tensor: Tensor) -> Tensor:
    """Return the values on the CPU; those of a complex tensor as pairs, in a last dimension."""
    tensor = tensor.detach().cpu()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _load_program(path: Path) -> Callable[..., Any]:
    return torch.export.load(path).module()


def _load_onnx(path: Path) -> Callable[..., Any]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors are also raised, so they need no log
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]

    def run(*args: Any, **kwargs: Any) -> list[Tensor]:
        inputs = [tensor.detach().cpu().numpy() for tensor in tensors_in((args, kwargs))]
        results = session.run(None, dict(zip(names, inputs, strict=True)))
        return [torch.as_tensor(each) for each in results]

    return run
