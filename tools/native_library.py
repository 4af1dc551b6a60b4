"""Compiles the native engine's library for a source tree, and all of them for a wheel.

    python -m tools.native_library                     `make`: for the PyTorch that is installed, into the package
    python -m tools.native_library --wheel             `make wheel`: for all supported versions, and the wheel
    python -m tools.native_library --wheel 2.13.0+cpu  for these

For a wheel nothing is installed: what is needed of another PyTorch than the installed one are its headers and two of
its libraries, which are taken out of its own wheel and kept under `.venvs/`.

Invariants:
    - Without a compiler the first form says so in one line and ends well: everything works on the reference engine.
    - The package has no library of other sources than it has itself: an older one is removed.
    - The wheel's platform is what its libraries need of the system, which their symbols say; see `platform_tag`.
    - Not part of the package.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console

from precast._internal import torch_versions
from precast.cli import build
from precast.errors import PrecastError
from precast.weights.native import library_file
from tools.versions import found_by_pip, numbers, say

__all__ = ["in_package", "main", "newest_of_each", "platform_tag", "unpack"]

ROOT: Final = Path(__file__).parent.parent
UNPACKED: Final = ROOT / ".venvs" / "headers"
LIBRARIES: Final = ROOT / "build" / "libraries"
_NEEDED: Final = re.compile(
    r"torch/(include/.+|version\.py|utils/cpp_extension\.py|lib/lib(c10|torch_cpu)\.(so|dylib))"
)

# Which symbols a Linux must have whose C library is so old at least: PEP 600, and auditwheel's table of policies.
_GLIBCXX: Final = {
    (3, 4, 24): (2, 28),
    (3, 4, 28): (2, 31),
    (3, 4, 29): (2, 34),
    (3, 4, 30): (2, 35),
    (3, 4, 33): (2, 39),
}
_OLDEST_GLIBC: Final = (2, 28)
"""The version of PyTorch's own wheels, below which no claim makes sense."""


def main(arguments: Sequence[str]) -> int:
    """Compile, and make the wheel if it is asked for; 0 if all went well."""
    parser = argparse.ArgumentParser(prog="python -m tools.native_library")
    parser.add_argument("--wheel", action="store_true", help="make a wheel for several versions")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where the wheel shall be")
    parser.add_argument("--stamp", type=Path, help="a file to touch when the library is there")
    parser.add_argument("versions", nargs="*", help="versions of PyTorch, for a wheel")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.wheel:
            print(
                wheel(chosen.versions or newest_of_each(found_by_pip(sys.executable)), chosen.out)
            )
        elif in_package() and chosen.stamp:
            chosen.stamp.touch()
    except PrecastError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    return 0


def in_package() -> Path | None:
    """Compiles into the package for the PyTorch that is installed; None, and a line, where there is no compiler."""
    compiler = build.find_compiler()
    if compiler is None:
        say("no C++ compiler: the native engine is left out, and the reference engine runs")
        return None
    with Console(stderr=True).status("compiling the native engine"):
        built = build.build(library_file.COMPILED, compiler=compiler)
    for path in library_file.candidates(library_file.COMPILED, built.torch):
        if path != built.path:
            path.unlink(missing_ok=True)
    return built.path


def newest_of_each(versions: Iterable[str]) -> list[str]:
    """The newest release of each minor version that precast supports, the oldest first."""
    newest: dict[torch_versions.Version, str] = {}
    for version in sorted(versions, key=numbers):
        newest[torch_versions.parse(version)] = version
    return [newest[minor] for minor in torch_versions.supported() if minor in newest]


def wheel(versions: Sequence[str], out: Path) -> Path:
    """Makes one wheel with a library for each version."""
    shutil.rmtree(LIBRARIES, ignore_errors=True)
    installed, libraries = build.installed_torch(), []
    for number, version in enumerate(versions, 1):
        say(f"PyTorch {version} ({number} of {len(versions)})")
        # Only the installed PyTorch can be loaded; the linker has checked all symbols for the others.
        is_here = numbers(version) == numbers(installed.version)
        torch = installed if is_here else build.torch_in(unpack(version))
        libraries.append(build.build(LIBRARIES, torch=torch, check=is_here).path)
    environment = {
        **os.environ,
        "HATCH_BUILD_HOOK_ENABLE_CUSTOM": "true",  # tools/wheel_hook.py
        "PRECAST_WHEEL_LIBRARIES": str(LIBRARIES),
        "PRECAST_WHEEL_PLATFORM": platform_tag(libraries),
    }
    with tempfile.TemporaryDirectory() as folder:
        build_wheel = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
        command = [*build_wheel, "--outdir", folder, str(ROOT)]
        subprocess.run(command, check=True, stdout=sys.stderr, env=environment)
        [path] = Path(folder).glob("*.whl")
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(path, out / path.name))


def unpack(version: str) -> Path:
    """The package folder of a PyTorch, with what is needed to compile for it; downloaded where it is not there."""
    folder_of_version = UNPACKED / f"torch-{version}"
    if not folder_of_version.exists():
        UNPACKED.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=UNPACKED) as folder:
            say(f"  taking the headers out of its wheel into {folder_of_version.relative_to(ROOT)}")
            options = ["--quiet", "--no-deps", "--only-binary", ":all:"]
            pip = [sys.executable, "-m", "pip", "download", *options]
            subprocess.run(
                [*pip, "--dest", folder, f"torch=={version}"], check=True, stdout=sys.stderr
            )
            [downloaded] = Path(folder).glob("*.whl")
            with zipfile.ZipFile(downloaded) as archive:
                names = filter(_NEEDED.fullmatch, archive.namelist())
                archive.extractall(Path(folder, "unpacked"), names)
            Path(folder, "unpacked").rename(folder_of_version)
    return folder_of_version / "torch"


def platform_tag(libraries: Iterable[Path]) -> str:
    """The oldest Linux that has all symbols these libraries need, such as `manylinux_2_28_x86_64`.

    The two libraries of PyTorch that they need come with PyTorch, which precast depends on, and are not counted.
    """
    if sys.platform != "linux":
        raise SystemExit("wheels with libraries are made on Linux")
    glibc: tuple[int, ...] = _OLDEST_GLIBC
    for library in libraries:
        symbols = subprocess.check_output(["readelf", "--version-info", str(library)], text=True)
        for kind, text in re.findall(r"Name: (GLIBC|GLIBCXX)_([\d.]+)", symbols):
            version = numbers(text)
            glibc = max(glibc, version if kind == "GLIBC" else _glibc_with(version))
    return f"manylinux_{glibc[0]}_{glibc[1]}_{platform.machine()}"


def _glibc_with(glibcxx: tuple[int, ...]) -> tuple[int, ...]:
    for newest, glibc in _GLIBCXX.items():
        if glibcxx <= newest:
            return glibc
    raise SystemExit(f"no manylinux is known to have GLIBCXX_{'.'.join(map(str, glibcxx))}")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
