"""The search for a library of the native engine for the loaded PyTorch, and its loading.

Invariants:
    - The search runs once per process, at the first use: importing this file loads neither the library nor PyTorch.
    - A library in the package has priority over one in the user's cache. An unsuitable library is refused before it is
      loaded, or by its probe, before any other of its functions runs.
    - At most one library is loaded: a second one, even a refused one, could conflict with it.
    - Everything works without a library, on the reference engine.
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

from precast._internal.locks import make_fork_safe
from precast.errors import PrecastError, PrecastWarning
from precast.weights.native import library_file

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
"""The command that compiles a library for the installed PyTorch."""


@dataclass(frozen=True, eq=False)
class Library:
    """A loaded library that has passed its probe. Its C functions run with the GIL held."""

    path: Path
    functions: ctypes.PyDLL


@dataclass(frozen=True)
class Unavailable:
    """The reason for not using the native engine in this process.

    Attributes:
        reason: a sentence without a full stop.
        remedy: the command that solves the problem; empty if there is none.
        is_refused: True if a library was found and refused, which causes a warning.
    """

    reason: str
    remedy: str = REMEDY
    is_refused: bool = False

    def __str__(self) -> str:
        return f"{self.reason}. Run: {self.remedy}" if self.remedy else f"{self.reason}."


_lock = make_fork_safe(threading.RLock())


def load() -> Library | Unavailable:
    """Return the library of this process, searched and loaded in the first call."""
    with _lock:
        return _find_once()


@functools.cache
def _find_once() -> Library | Unavailable:
    return find()


def find() -> Library | Unavailable:
    """Search for the library and load it, without the cache of `load`; for `load` and tests."""
    import torch

    if sys.platform == "win32":
        return Unavailable("the native engine is not built on Windows", "")
    if not getattr(sys, "_is_gil_enabled", lambda: True)():  # new in Python 3.13
        return Unavailable("this Python runs without a GIL, which the native engine needs", "")
    version = str(torch.__version__)
    refusals, others = [], []
    for folder in _folders():
        for path in library_file.candidates(folder, version):
            if not library_file.is_of_these_sources(path, version):
                others.append(path)  # another version of precast uses the same cache
                continue
            refusal = library_file.refusal(path)
            if refusal is None:
                return open_library(path)
            refusals.append(refusal)
    if refusals:
        return Unavailable(refusals[0], is_refused=True)
    if others:
        return Unavailable(
            f"{others[0]} was compiled from the sources of another version of precast"
        )
    return Unavailable(f"no library has been compiled for PyTorch {version} on this machine")


def _folders() -> list[Path]:
    folders = [library_file.COMPILED]
    with contextlib.suppress(PrecastError):  # no home directory, so no cache
        folders.append(library_file.cache_folder())
    return folders


def open_library(path: Path) -> Library | Unavailable:
    """Load a library whose file has been checked, and run its probe of the loaded PyTorch."""
    import torch  # noqa: F401 -- the library is linked to what this loads

    try:
        functions = ctypes.PyDLL(str(path))
        probe = functions.precast_native_probe
    except (OSError, AttributeError) as error:
        return Unavailable(f"{path} cannot be loaded: {error}", is_refused=True)
    probe.restype = ctypes.c_char_p
    defect = probe()
    if defect is not None:
        return Unavailable(
            f"{path} must not be used: {defect.decode(errors='replace')}", is_refused=True
        )
    return Library(path, functions)


def chosen_engine() -> str:
    """Return the engine named by `PRECAST_ENGINE`, by default the native one if it can be loaded: one of `ENGINES`.

    A refused library causes a warning, because its owner expects it to be used.

    Raises:
        PrecastError: `PRECAST_ENGINE` has an invalid value, or is "native" and the library cannot be loaded.
    """
    choice = os.environ.get("PRECAST_ENGINE", "")
    if choice not in ("", *ENGINES):
        raise PrecastError(f"PRECAST_ENGINE is {choice!r}. Allowed: {', '.join(ENGINES)}")
    if choice == "reference":
        return choice
    result = load()
    if isinstance(result, Library):
        return "native"
    if choice == "native":
        raise PrecastError(f"PRECAST_ENGINE is 'native', but {result}")
    if result.is_refused:
        warnings.warn(f"The reference engine is used: {result}", PrecastWarning, stacklevel=2)
    return "reference"


if __name__ == "__main__":  # in a separate process, because the library may crash
    outcome = open_library(Path(sys.argv[1]))
    sys.exit(outcome.reason if isinstance(outcome, Unavailable) else 0)
