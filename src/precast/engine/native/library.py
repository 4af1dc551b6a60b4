"""Finds the library of the native engine for the PyTorch that is loaded, and loads it.

Invariants:
    - It is looked for once in a process, when it is first asked for: importing this loads neither it nor PyTorch.
    - A library in the package comes before one in the user's cache. What is refused is refused before it is loaded, or
      by its own probe before anything else of it runs.
    - One library at most is loaded: another one beside it, even one that was refused, could collide with it.
    - Without a library everything works: the reference engine runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from precast._internal.locks import survives_fork
from precast.engine.native import library_file
from precast.errors import PrecastError, PrecastWarning

__all__ = [
    "ENGINES",
    "REMEDY",
    "Library",
    "Unavailable",
    "chosen_engine",
    "find",
    "load",
    "open_library",
]

ENGINES: Final = ("reference", "native")
REMEDY: Final = "precast build"
"""The command that makes a library for the PyTorch that is installed."""


@dataclass(frozen=True, eq=False)
class Library:
    """A library that is loaded and has passed its probe.

    Attributes:
        path: its file.
        functions: its C functions. The GIL is kept while one runs.
        marker: what it was compiled for.
    """

    path: Path
    functions: ctypes.PyDLL
    marker: library_file.Marker


@dataclass(frozen=True)
class Unavailable:
    """Why there is no native engine in this process.

    Attributes:
        reason: a sentence without its full stop.
        remedy: the command that mends it; empty where there is none.
        is_refused: whether there was a library that must not be used, which somebody wants to know.
    """

    reason: str
    remedy: str = REMEDY
    is_refused: bool = False

    def __str__(self) -> str:
        return f"{self.reason}. Mend it: {self.remedy}" if self.remedy else f"{self.reason}."


_lock = survives_fork(threading.RLock())


def load() -> Library | Unavailable:
    """The library for this process, looked for and loaded when it is first asked for."""
    with _lock:
        return _found()


@functools.cache
def _found() -> Library | Unavailable:
    return find()


def find() -> Library | Unavailable:
    """Looks for the library and loads it, whatever `load` has found; for `load`, and for tests."""
    import torch

    if sys.platform == "win32":
        return Unavailable("the native engine is not built on Windows", "")
    version = str(torch.__version__)
    refused, others = [], []
    for folder in _folders():
        for path in library_file.candidates(folder, version):
            if not library_file.is_of_these_sources(path, version):
                others.append(path)  # of another precast, which shares the cache
                continue
            wrong = library_file.refusal(path, version)
            if wrong is None:
                return open_library(path)
            refused.append(wrong)
    if refused:
        return Unavailable(refused[0], is_refused=True)
    if others:
        return Unavailable(f"{others[0]} was compiled from the sources of another precast")
    return Unavailable(f"no library has been compiled for PyTorch {version} on this machine")


def _folders() -> list[Path]:
    folders = [library_file.COMPILED]
    with contextlib.suppress(PrecastError):  # no home directory: then there is no cache
        folders.append(library_file.cache_folder())
    return folders


def open_library(path: Path) -> Library | Unavailable:
    """Loads a library whose file is in order, and asks it whether it fits the PyTorch that is loaded."""
    import torch  # the library is linked to what this loads

    marker = library_file.read_marker(path.read_bytes())
    assert marker is not None
    if marker.cxx11_abi != torch.compiled_with_cxx11_abi():
        return Unavailable(
            f"{path} was compiled for another C++ ABI than PyTorch's", is_refused=True
        )
    try:
        functions = ctypes.PyDLL(str(path))
        built_for, probe = functions.precast_native_built_for, functions.precast_native_probe
    except (OSError, AttributeError) as error:
        return Unavailable(f"{path} cannot be loaded: {error}", is_refused=True)
    built_for.restype = probe.restype = ctypes.c_char_p
    wrong = probe()
    if wrong is not None:
        return Unavailable(
            f"{path} must not be used: {wrong.decode(errors='replace')}", is_refused=True
        )
    return Library(path, functions, marker)


def chosen_engine() -> str:
    """The engine that `PRECAST_ENGINE` asks for, or without it the native one where it can be loaded: one of `ENGINES`.

    A library that was refused is told of by a warning, since whoever has one expects it to be used.

    Raises:
        PrecastError: `PRECAST_ENGINE` is something else, or "native" where that cannot be loaded.
    """
    asked = os.environ.get("PRECAST_ENGINE", "")
    if asked not in ("", *ENGINES):
        raise PrecastError(f"PRECAST_ENGINE is {asked!r}. Allowed: {', '.join(ENGINES)}")
    if asked == "reference":
        return asked
    found = load()
    if isinstance(found, Library):
        return "native"
    if asked == "native":
        raise PrecastError(f"PRECAST_ENGINE asks for the native engine, and {found}")
    if found.is_refused:
        warnings.warn(f"The reference engine runs: {found}", PrecastWarning, stacklevel=2)
    return "reference"


if __name__ == "__main__":  # in a process of its own, which a library may end
    judged = open_library(Path(sys.argv[1]))
    sys.exit(judged.reason if isinstance(judged, Unavailable) else 0)
