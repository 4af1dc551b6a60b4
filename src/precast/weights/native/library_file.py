"""The file of a compiled library: its name, its folders, and the checks before it is loaded.

A name such as `precast-torch2.13-linux_x86_64-<sources>-<compiler>-<content>.so` contains the version of PyTorch, the
platform, the hashes of the sources and the compiler, and the hash of the file's content. A library for a minor version
serves all builds of it (CPU, CUDA, ROCm, XPU) and all versions of Python.

Invariants:
    - Neither a library nor PyTorch is loaded here: a file is checked by its name and its bytes.
    - The hash of the content includes the rest of the name. So a file that is damaged, incomplete or renamed is
      detected before it is loaded, because loading it could crash the process.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from precast.errors import PrecastError

__all__ = [
    "COMPILED",
    "FLAGS",
    "SOURCES",
    "cache_folder",
    "candidates",
    "file_name",
    "fingerprint",
    "is_of_these_sources",
    "prefix",
    "refusal",
    "source_hash",
    "sources",
    "torch_key",
]

SOURCES: Final = Path(__file__).parent
COMPILED: Final = SOURCES / "compiled"
"""The folder of a wheel's libraries, and of the library that `make` compiles."""

FLAGS: Final = (
    "-O2",
    "-DNDEBUG",  # as PyTorch's own binaries are compiled
    "-fPIC",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    "-Wall",
    "-Wextra",
    "-Wmissing-declarations",  # of a function that `boundary.h` does not declare
)
"""The compiler flags; part of the hash of the sources."""

_RELEASE = re.compile(r"(\d+\.\d+)\.\d+(\.post\d+)?(\+.*)?")


def torch_key(version: str) -> str:
    """Return the versions of PyTorch that share a library: the minor version of a release, or a single other build.

    `2.13.1+cu130` -> `2.13`; `2.15.0a0+git1234` is unchanged: its C++ may change with each build.
    """
    release = _RELEASE.fullmatch(version)
    return release[1] if release else version


def sources() -> list[Path]:
    """Return the source files of the library, in a fixed order."""
    return sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")])


@functools.cache
def source_hash() -> str:
    """Return the hash of the sources and the flags."""
    return fingerprint(
        [" ".join(FLAGS).encode(), *(p.name.encode() + b"\0" + p.read_bytes() for p in sources())]
    )


def fingerprint(parts: Iterable[bytes]) -> str:
    """Return sixteen hexadecimal digits that identify a sequence of texts."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(hashlib.sha256(part).digest())
    return whole.hexdigest()[:16]


def prefix(version: str) -> str:
    """Return the prefix of the names of all libraries for a PyTorch on this platform."""
    return f"precast-torch{torch_key(version)}-{sys.platform}_{platform.machine().lower()}-"


def file_name(version: str, compiler: str, content: bytes) -> str:
    """Return the file name of a library from these sources, for a version of PyTorch; `compiler` is its key."""
    start = f"{prefix(version)}{source_hash()}-{compiler}"
    return f"{start}-{fingerprint([start.encode(), content])}.so"


def cache_folder() -> Path:
    """Return the folder of a user's libraries: in `$XDG_CACHE_HOME`, `~/.cache` or, on macOS, `~/Library/Caches`.

    Raises:
        PrecastError: there is no home directory.
    """
    configured = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(configured):  # the specification says to ignore relative paths
        return Path(configured) / "precast"
    try:
        home = Path.home()
    except RuntimeError as error:
        raise PrecastError(f"{error}: set XDG_CACHE_HOME to a folder you may write to") from error
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "precast"


def is_of_these_sources(path: Path, version: str) -> bool:
    """Return True if a library has the name of one for this PyTorch from the present sources."""
    return path.name.startswith(prefix(version) + source_hash())


def candidates(folder: Path, version: str) -> list[Path]:
    """Return the libraries in a folder for this PyTorch: first those of the present sources, newest first."""
    start, matches = prefix(version), []
    with contextlib.suppress(OSError):  # no folder, or no permission
        for path in folder.iterdir():
            if path.name.startswith(start) and path.suffix == ".so":
                matches.append((is_of_these_sources(path, version), path.stat().st_mtime_ns, path))
    return [path for *_, path in sorted(matches, reverse=True)]


def refusal(path: Path) -> str | None:
    """Return the reason why a library must not be loaded; None if it may."""
    try:
        content = path.read_bytes()
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    start, _, end = path.stem.rpartition("-")
    if end != fingerprint([start.encode(), content]):
        return f"{path} is damaged or half written: its content is not what its name says"
    return None
