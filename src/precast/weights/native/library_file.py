"""The file of a compiled library: its name, its folders, and the checks before it is loaded.

A name such as `precast-torch2.13-linux_x86_64-<sources>-<compiler>-<content>.so` contains the version of PyTorch, the
platform, the hashes of the sources and the compiler, and the hash of the file's content. A library for a minor version
serves all builds of it (CPU, CUDA, ROCm, XPU) and all versions of Python.

Invariants:
    - Neither a library nor PyTorch is loaded here: a file is checked by its name and its bytes.
    - A file that is damaged, incomplete, renamed, or made from other sources or for another PyTorch is detected before
      it is loaded, because loading it could crash the process.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from precast.errors import PrecastError

__all__ = [
    "COMPILED",
    "FLAGS",
    "SOURCES",
    "Marker",
    "cache_folder",
    "candidates",
    "file_name",
    "fingerprint",
    "is_of_these_sources",
    "prefix",
    "read_marker",
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
_MARKER = re.compile(
    rb"precast-native-library\|torch=([^|\0]{1,99})\|for=([^|\0]{1,99})\|cxx11_abi=([01])\|sources=([0-9a-f]{1,64})\|"
)


@dataclass(frozen=True)
class Marker:
    """The data that a library contains about itself.

    Attributes:
        torch: the version of PyTorch whose headers it was compiled with, such as "2.13.0".
        key: the versions of PyTorch that may load it, see `torch_key`.
        cxx11_abi: the C++ ABI of GCC's standard library.
        sources: the hash of its sources, see `source_hash`.
    """

    torch: str
    key: str
    cxx11_abi: bool
    sources: str


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
    """Return the file name of a library from these sources.

    Args:
        version: the version of PyTorch.
        compiler: the key of the compiler.
        content: the content of the file.
    """
    return f"{prefix(version)}{source_hash()}-{compiler}-{fingerprint([content])}.so"


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


def read_marker(content: bytes) -> Marker | None:
    """Return the marker in a library's bytes; None if there is none."""
    match = _MARKER.search(content)
    if match is None:
        return None
    torch, key, abi, source_hash = (part.decode(errors="replace") for part in match.groups())
    return Marker(torch, key, abi == "1", source_hash)


def refusal(path: Path, version: str) -> str | None:
    """Return the reason why a library must not be loaded; None if it may.

    Args:
        path: the library.
        version: the version of the installed PyTorch.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    if path.stem.rpartition("-")[2] != fingerprint([content]):
        return f"{path} is damaged or half written: its content is not what its name says"
    marker = read_marker(content)
    if marker is None:
        return f"{path} is no library of precast's"
    if marker.key != torch_key(version) or not version.startswith(
        marker.torch.split("+")[0].rpartition(".")[0]
    ):
        return f"{path} was compiled for PyTorch {marker.torch}, and {version} is installed"
    if marker.sources != source_hash():
        return f"{path} was compiled from the sources of another precast"
    return None
