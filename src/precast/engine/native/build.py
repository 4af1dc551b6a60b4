"""Compiles the library of the native engine, and puts it where the loader finds it.

Invariants:
    - What is installed of PyTorch is its headers and libraries; neither PyTorch nor Python's headers are loaded for it.
    - A library appears in the folder in one step, complete and on the disk, after it was loaded and probed in a process
      of its own: one that would crash never gets there. Whatever fails leaves no other file behind than the log.
    - Two processes that build at once do it one after the other, and the second finds what the first has made.
    - Every failure is a `BuildError` of one line.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from precast._internal import atomic_write, torch_versions
from precast.engine.native import library_file
from precast.errors import BuildError, OutputError

__all__ = ["Built", "Compiler", "Torch", "build", "find_compiler", "installed_torch"]

_COMPILERS: Final = ("c++", "g++", "clang++")
_STANDARD: Final = "c++20"
LOG: Final = "build.log"


@dataclass(frozen=True)
class Torch:
    """A PyTorch to compile for: its version, and the folder of the package `torch`."""

    version: str
    folder: Path

    @property
    def standard(self) -> str:
        """The C++ that its headers need, which PyTorch's own builder of extensions says."""
        with contextlib.suppress(OSError):
            text = (self.folder / "utils" / "cpp_extension.py").read_text(encoding="utf-8")
            named = re.findall(r"-std=(c\+\+\d+)", text)
            return max(named, default=_STANDARD)
        return _STANDARD


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: the words of its command, and what it says of its version."""

    command: tuple[str, ...]
    version: str

    @property
    def key(self) -> str:
        """Eight digits that tell it from another compiler."""
        return library_file.fingerprint([" ".join(self.command).encode(), self.version.encode()])[
            :8
        ]


@dataclass(frozen=True)
class Built:
    """What `build` gives.

    Attributes:
        path: the library.
        torch: the version of PyTorch it is for.
        compiler: what the compiler says of its version; None where none was needed.
        is_new: False where it was there already.
    """

    path: Path
    torch: str
    compiler: str | None
    is_new: bool


Advance = Callable[[str, int, int], None]
"""Told what is done next, how many steps are done, and of how many."""


def installed_torch() -> Torch:
    """The PyTorch that this Python would import, found without importing it.

    Raises:
        BuildError: there is none, or one without headers.
        TorchVersionError: it is older than precast can run on.
    """
    try:
        spec = importlib.util.find_spec("torch")
    except ValueError:  # `sys.modules` has something by that name that is no module of a file
        spec = None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        torch = torch_in(Path(folder))
        torch_versions.check(torch.version)
        return torch
    raise BuildError(
        "precast build needs PyTorch, which is not installed here: the library is compiled with its headers"
    )


def torch_in(folder: Path) -> Torch:
    """The PyTorch whose package is in a folder.

    Raises:
        BuildError: its version or its headers are not there.
    """
    try:
        text = (folder / "version.py").read_text(encoding="utf-8")
    except OSError as error:
        raise BuildError(
            f"the version of the PyTorch in {folder} cannot be read: {error.strerror}"
        ) from error
    version = re.search(r"^__version__ = '([^']+)'", text, re.M)
    if version is None or not (folder / "include" / "ATen" / "ATen.h").is_file():
        raise BuildError(
            f"the PyTorch in {folder} has no headers to compile with; install it from a wheel of pip's"
        )
    return Torch(version[1], folder)


def find_compiler() -> Compiler | None:
    """The compiler that `CXX` names, else the first of `c++`, `g++` and `clang++` that is there; None without any.

    Raises:
        BuildError: `CXX` names one that is not there, or that does not run.
    """
    try:
        asked = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise BuildError(f"CXX is {os.environ['CXX']!r}, which is no command: {error}") from error
    if asked:
        if shutil.which(asked[0]) is None:
            raise BuildError(
                f"CXX is {os.environ['CXX']!r}, and there is no such compiler; unset it or name another"
            )
        return _compiler(asked)
    for name in _COMPILERS:
        if shutil.which(name) is not None:
            return _compiler([name])
    return None


def _compiler(command: Sequence[str]) -> Compiler:
    try:
        done = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, errors="replace", check=False
        )
    except OSError as error:
        raise BuildError(
            f"the compiler {shlex.join(command)} cannot be run: {error.strerror}"
        ) from error
    if done.returncode:
        raise BuildError(
            f"the compiler {shlex.join(command)} does not work: --version {_ended(done.returncode)}"
        )
    return Compiler(tuple(command), done.stdout.strip().partition("\n")[0])


def build(
    folder: Path | None = None,
    *,
    torch: Torch | None = None,
    compiler: Compiler | None = None,
    check: bool = True,
    advance: Advance = lambda *_: None,
) -> Built:
    """Compiles the library, or finds that it is there already.

    Args:
        folder: where it shall be; by default the user's cache, unless the package has one that works.
        torch: what it is for; by default the one that is installed.
        compiler: by default the one that `find_compiler` finds.
        check: whether it is loaded and probed in a process of its own, which needs `torch` to be the installed one.
        advance: told of each step before it begins.

    Raises:
        BuildError: there is no compiler, it failed, or what it made does not work; one line, and where the log is.
        OutputError: the folder cannot be written.
    """
    if sys.platform == "win32":
        raise BuildError(
            "the native engine is not built on Windows; the reference engine runs there"
        )
    torch = torch or installed_torch()
    shipped = _in_package(torch, check) if folder is None else None
    if shipped is not None:
        return Built(shipped, torch.version, None, is_new=False)
    compiler = compiler or find_compiler()
    if compiler is None:
        raise BuildError(
            f"no C++ compiler was found (CXX is not set; tried {', '.join(_COMPILERS)}). Install one, such as g++, "
            "or go on without: the reference engine runs"
        )
    folder = folder or library_file.cache_folder()
    job = _Job(folder, torch, compiler, check, advance)
    with _locked(folder, lambda: advance("waiting for another process that builds", 0, 1)):
        found = job.find()
        return Built(found or job.make(), torch.version, compiler.version, is_new=found is None)


def _in_package(torch: Torch, check: bool) -> Path | None:
    """The library of the package, if it has one that works."""
    for path in library_file.candidates(library_file.COMPILED, torch.version):
        if _wrong(path, torch, check) is None:
            return path
    return None


def _wrong(path: Path, torch: Torch, check: bool) -> str | None:
    """What is wrong with a library; with `check` it is loaded too, in a process that it may end."""
    refused = library_file.refusal(path, torch.version)
    if refused is not None or not check:
        return refused
    command = [sys.executable, "-P", "-m", "precast.engine.native.library", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode == 0:
        return None
    told = done.stderr.strip().rpartition("\n")[2]
    return told if done.returncode == 1 and told else f"loading it {_ended(done.returncode)}"


@contextlib.contextmanager
def _locked(folder: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Lets one process at a time build in a folder. The lock of a process that was killed is free."""
    import fcntl  # not on Windows

    path = folder / ".lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise _cannot_write(folder, error) from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:  # a file system without locks
            raise _cannot_write(folder, error) from error
        yield
    finally:
        os.close(handle)


def _cannot_write(folder: Path, error: OSError) -> OutputError:
    refused = OutputError(error.errno, error.strerror or str(error), str(folder))
    refused.remedy = "Set XDG_CACHE_HOME to a folder you may write to"
    return refused


@dataclass(frozen=True)
class _Job:
    folder: Path
    torch: Torch
    compiler: Compiler
    check: bool
    advance: Advance

    def find(self) -> Path | None:
        """The library, if it is there and works; one that does not is removed."""
        start = f"{library_file.prefix(self.torch.version)}{library_file.source_hash()}-{self.compiler.key}-"
        for path in library_file.candidates(self.folder, self.torch.version):
            if path.name.startswith(start):
                if _wrong(path, self.torch, self.check) is None:
                    return path
                path.unlink(missing_ok=True)
        return None

    def make(self) -> Path:
        try:
            with tempfile.TemporaryDirectory(prefix="precast-build-") as work:
                name, content = self._make_in(Path(work))
        except OSError as error:  # of the temporary folder, or a compiler that has made nothing
            raise BuildError(f"the library could not be made: {error}") from error
        kept = self.folder / name
        atomic_write.replace(kept, content, 0o755)
        with contextlib.suppress(OSError):
            (self.folder / LOG).unlink()  # of a compiler that has failed before
        return kept

    def _make_in(self, work: Path) -> tuple[str, bytes]:
        """Compiles, links and checks; the library's name and content."""
        objects = sorted(work / f"{path.stem}.o" for path in library_file.SOURCES.glob("*.cpp"))
        steps = len(objects) + 2
        self.advance("compiling", 0, steps)
        with ThreadPoolExecutor(_cores()) as pool:
            for done, _ in enumerate(pool.map(self._compile, objects), 1):
                self.advance("compiling", done, steps)
        self.advance("linking", steps - 2, steps)
        made = work / "library.so"
        inputs = [*map(str, objects), *self._libraries()]
        self._run([*self.compiler.command, *_LINK, "-o", str(made), *inputs])
        self.advance("checking", steps - 1, steps)
        content = made.read_bytes()
        name = library_file.file_name(self.torch.version, self.compiler.key, content)
        wrong = _wrong(made.rename(work / name), self.torch, self.check)
        if wrong:
            raise BuildError(f"what {self.compiler.version} has made does not work: {wrong}")
        return name, content

    def _compile(self, target: Path) -> None:
        include = self.torch.folder / "include"
        key, made_of = library_file.torch_key(self.torch.version), library_file.source_hash()
        self._run(
            [
                *self.compiler.command,
                *library_file.FLAGS,
                f"-std={self.torch.standard}",
                "-D_GLIBCXX_USE_CXX11_ABI=1",  # the only one that PyTorch's wheels have
                f'-DPRECAST_TORCH_KEY="{key}"',
                f'-DPRECAST_SOURCES="{made_of}"',
                f"-ffile-prefix-map={include}=torch",  # or messages name folders of this machine
                f"-ffile-prefix-map={library_file.SOURCES}=precast",
                "-isystem",  # warnings about PyTorch's headers are not ours to mend
                str(include),
                "-isystem",
                str(include / "torch" / "csrc" / "api" / "include"),
                "-c",
                str(library_file.SOURCES / f"{target.stem}.cpp"),
                "-o",
                str(target),
            ]
        )

    def _libraries(self) -> list[str]:
        if sys.platform == "darwin":
            return ["-undefined", "dynamic_lookup"]
        # Found by name when it is loaded, since PyTorch is loaded by then: no folder of this machine is written down.
        return [f"-L{self.torch.folder / 'lib'}", "-ltorch_cpu", "-lc10"]

    def _run(self, command: Sequence[str]) -> None:
        try:
            done = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                check=False,
                env={**os.environ, "LC_ALL": "C"},  # its errors are found by the English word
            )
        except OSError as error:
            raise BuildError(
                f"the compiler {command[0]} cannot be run: {error.strerror}"
            ) from error
        if done.returncode:
            log = self._log(f"{shlex.join(command)}\n{done.stdout}")
            raise BuildError(
                f"{self.compiler.command[0]} {_ended(done.returncode)}{_first_error(done.stdout)}; {log}"
            )

    def _log(self, text: str) -> str:
        """Keeps what the compiler has said; says where."""
        path = self.folder / LOG
        try:
            atomic_write.replace(path, text.encode())
        except OutputError as error:
            return str(error)
        return f"all that it said is in {path}"


_LINK: Final = ("-shared", "-Wl,--no-undefined") if sys.platform == "linux" else ("-shared",)


def _ended(code: int) -> str:
    """How a process ended, as the end of a sentence."""
    if code > 0:
        return f"failed with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}" + (" (is there enough memory?)" if name == "SIGKILL" else "")


def _first_error(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    first = next(
        (line for line in lines if re.search(r"\berror\b|undefined reference", line, re.I)), None
    )
    first = first or (lines[0] if lines else None)
    return f": {first}" if first else " and said nothing"


def _cores() -> int:
    return max(1, min(4, os.cpu_count() or 1))  # a compiler takes some hundred MB
