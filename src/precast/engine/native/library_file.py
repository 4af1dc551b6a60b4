"""The file of a compiled library: what it is called, where it is looked for, and whether it may be loaded.

A name such as `precast-torch2.13-linux_x86_64-<sources>-<compiler>-<content>.so` says for which PyTorch and platform
the library is, from which sources and by which compiler it was made, and ends with the hash of what is in the file.
The library of one minor version serves all builds of it (CPU, CUDA, ROCm, XPU) and all versions of Python.

Invariants:
    - Nothing is loaded here, neither a library nor PyTorch: a file is judged by its name and its bytes.
    - A file that is damaged, half written, renamed, or made from other sources or for another PyTorch is told from a
      good one before it is loaded, since loading it could end the process.
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
"""Where a wheel has its libraries, and where `make` puts the one of a source tree."""

FLAGS: Final = (
    "-O2",
    "-DNDEBUG",  # as PyTorch's own binaries are compiled
    "-fPIC",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    "-Wall",
)
"""What every library is compiled with; part of the hash of its sources."""

_RELEASE = re.compile(r"(\d+\.\d+)\.\d+(\.post\d+)?(\+.*)?")
_MARKER = re.compile(
    rb"precast-native-library\|torch=([^|\0]{1,99})\|for=([^|\0]{1,99})\|cxx11_abi=([01])\|sources=([0-9a-f]{1,64})\|"
)


@dataclass(frozen=True)
class Marker:
    """What a library says of itself.

    Attributes:
        torch: the version of PyTorch whose headers it was compiled with, such as "2.13.0".
        key: for which versions of PyTorch it is, see `torch_key`.
        cxx11_abi: the C++ ABI of GCC's standard library.
        sources: the hash of its sources, see `source_hash`.
    """

    torch: str
    key: str
    cxx11_abi: bool
    sources: str


def torch_key(version: str) -> str:
    """For which versions of PyTorch one library does: the minor version of a release, or one build of another.

    `2.13.1+cu130` -> `2.13`, and `2.15.0a0+git1234` stays as it is: its C++ may change with each build.
    """
    release = _RELEASE.fullmatch(version)
    return release[1] if release else version


def sources() -> list[Path]:
    """The files that make a library, in a fixed order."""
    return sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")])


@functools.cache
def source_hash() -> str:
    """Of all that makes a library but PyTorch and the compiler: the sources and the flags."""
    return fingerprint(
        [" ".join(FLAGS).encode(), *(p.name.encode() + b"\0" + p.read_bytes() for p in sources())]
    )


def fingerprint(parts: Iterable[bytes]) -> str:
    """Sixteen digits that tell one sequence of texts from another."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(hashlib.sha256(part).digest())
    return whole.hexdigest()[:16]


def prefix(version: str) -> str:
    """How the names of all libraries for a PyTorch on this platform begin."""
    return f"precast-torch{torch_key(version)}-{sys.platform}_{platform.machine().lower()}-"


def file_name(version: str, compiler: str, content: bytes) -> str:
    """What the library of these sources is called.

    Args:
        version: of PyTorch.
        compiler: what tells the compiler from others.
        content: what is in the file.
    """
    return f"{prefix(version)}{source_hash()}-{compiler}-{fingerprint([content])}.so"


def cache_folder() -> Path:
    """Where a user's libraries are: `precast` in `$XDG_CACHE_HOME`, else in `~/.cache` (macOS: `~/Library/Caches`).

    Raises:
        PrecastError: there is no home directory.
    """
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(chosen):  # the specification says to ignore another
        return Path(chosen) / "precast"
    try:
        home = Path.home()
    except RuntimeError as error:
        raise PrecastError(f"{error}: set XDG_CACHE_HOME to a folder you may write to") from error
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "precast"


def is_of_these_sources(path: Path, version: str) -> bool:
    """Whether a library is called as one for this PyTorch from the sources that are here."""
    return path.name.startswith(prefix(version) + source_hash())


def candidates(folder: Path, version: str) -> list[Path]:
    """The libraries in a folder that are called as one for this PyTorch is, the best first.

    Those of these sources come first, and of these the newest.
    """
    start, found = prefix(version), []
    with contextlib.suppress(OSError):  # there is no folder, or none that may be read
        for path in folder.iterdir():
            if path.name.startswith(start) and path.suffix == ".so":
                found.append((is_of_these_sources(path, version), path.stat().st_mtime_ns, path))
    return [path for *_, path in sorted(found, reverse=True)]


def read_marker(content: bytes) -> Marker | None:
    """What a library says of itself; None where the bytes are of something else."""
    found = _MARKER.search(content)
    if found is None:
        return None
    torch, key, abi, made_of = (part.decode(errors="replace") for part in found.groups())
    return Marker(torch, key, abi == "1", made_of)


def refusal(path: Path, version: str) -> str | None:
    """Why a library must not be loaded; None where it may.

    Args:
        path: of the library.
        version: of the PyTorch that is installed.
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
