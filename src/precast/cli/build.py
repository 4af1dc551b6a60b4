"""Compilation of the native engine's library.

Invariants:
    - PyTorch's headers and libraries are used; PyTorch is not imported, and Python's headers are not needed.
    - A library is moved into its folder atomically, after it was loaded and probed in a separate process, so a library
      that crashes never gets there. A failure leaves no file but the log.
    - Processes that build at the same time run one after the other, and the later ones use the first one's library.
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
from precast.errors import BuildError, OutputError
from precast.weights.native import library_file

__all__ = ["BuildResult", "Compiler", "TorchInstallation", "build", "find_compiler"]
__all__ += ["installed_torch", "torch_in"]

_COMPILERS: Final = ("c++", "g++", "clang++")
LOG: Final = "build.log"


@dataclass(frozen=True)
class TorchInstallation:
    """The PyTorch to compile for: its version, and the folder of the package `torch`."""

    version: str
    folder: Path


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: its command, and its version text."""

    command: tuple[str, ...]
    version: str

    @property
    def key(self) -> str:
        """Eight hexadecimal digits that identify the compiler."""
        texts = " ".join(self.command), self.version
        return library_file.fingerprint([text.encode() for text in texts])[:8]


@dataclass(frozen=True)
class BuildResult:
    """The result of `build`.

    Attributes:
        path: the library.
        torch: the version of PyTorch.
        compiler: the compiler's version text; None if no compiler was needed.
        is_new: False if the library already existed.
    """

    path: Path
    torch: str
    compiler: str | None
    is_new: bool


BuildProgress = Callable[[str, int, int], None]
"""Called with the next step, the number of finished steps, and their total."""


def installed_torch() -> TorchInstallation:
    """Return the PyTorch that this Python would import, without importing it.

    Raises:
        BuildError: PyTorch is not installed, or has no headers.
        TorchVersionError: it is older than precast supports.
    """
    try:
        spec = importlib.util.find_spec("torch")
    except ValueError:  # the entry of `sys.modules` is not a module with a file
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise BuildError(
            "precast build needs PyTorch, which is not installed here: the library is compiled with its headers"
        )
    torch = torch_in(Path(spec.submodule_search_locations[0]))
    torch_versions.check(torch.version)
    return torch


def torch_in(folder: Path) -> TorchInstallation:
    """Return the PyTorch whose package is in a folder.

    Raises:
        BuildError: its version or its headers are missing.
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
    return TorchInstallation(version[1], folder)


def find_compiler() -> Compiler | None:
    """Return the compiler named by `CXX`, else the first of `c++`, `g++` and `clang++`; None if there is none.

    Raises:
        BuildError: the compiler named by `CXX` does not exist, or does not run.
    """
    text = os.environ.get("CXX", "")
    try:
        command = shlex.split(text)
    except ValueError as error:
        raise BuildError(f"CXX is {text!r}, which is no command: {error}") from error
    if command and shutil.which(command[0]) is None:
        raise BuildError(
            f"CXX is {text!r}, and there is no such compiler; unset it or name another"
        )
    command = command or [name for name in _COMPILERS if shutil.which(name)][:1]
    if not command:
        return None
    done = _run([*command, "--version"])
    if done.returncode:
        raise BuildError(
            f"the compiler {shlex.join(command)} does not work: --version {_exit_text(done.returncode)}"
        )
    return Compiler(tuple(command), done.stdout.strip().partition("\n")[0])


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a compiler. Its output is in English, because an error is recognized by the word."""
    try:
        return subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except OSError as error:
        raise BuildError(f"the compiler {command[0]} cannot be run: {error.strerror}") from error


def build(
    folder: Path | None = None,
    *,
    torch: TorchInstallation | None = None,
    compiler: Compiler | None = None,
    check: bool = True,
    progress: BuildProgress = lambda *_: None,
) -> BuildResult:
    """Compile the library, unless it exists already.

    By default it is kept in the user's cache, unless the package has a working library. With `check` it is loaded and
    probed in a separate process, for which `torch` must be the installed one.

    Raises:
        BuildError: there is no compiler, it failed, or the library does not work; one line with the path of the log.
        OutputError: the folder cannot be written.
    """
    if sys.platform == "win32":
        raise BuildError(
            "the native engine is not built on Windows; the reference engine runs there"
        )
    torch = torch or installed_torch()
    if folder is None:
        for path in library_file.candidates(library_file.COMPILED, torch.version):
            if _defect(path, check) is None:
                return BuildResult(path, torch.version, None, is_new=False)
    compiler = compiler or find_compiler()
    if compiler is None:
        raise BuildError(
            f"no C++ compiler was found (CXX is not set; tried {', '.join(_COMPILERS)}). Install one, such as g++, "
            "or go on without: the reference engine runs"
        )
    job = _BuildJob(folder or library_file.cache_folder(), torch, compiler, check, progress)
    with _locked(job.folder, lambda: progress("waiting for another process that builds", 0, 1)):
        existing = job.find()
        path = existing or job.make()
        return BuildResult(path, torch.version, compiler.version, is_new=existing is None)


def _defect(path: Path, check: bool) -> str | None:
    """Return the defect of a library, if any; with `check` it is also loaded, in a separate process."""
    defect = library_file.refusal(path)
    if defect is not None or not check:
        return defect
    command = [sys.executable, "-P", "-m", "precast.weights.native.library", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    message = done.stderr.strip().rpartition("\n")[2] if done.returncode == 1 else ""
    return (message or f"loading it {_exit_text(done.returncode)}") if done.returncode else None


@contextlib.contextmanager
def _locked(folder: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Let one process at a time build in a folder. The lock of a killed process is free."""
    import fcntl  # not on Windows

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / ".lock", "ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(file, fcntl.LOCK_EX)
            yield
    except OutputError:
        raise
    except OSError as error:
        output_error = OutputError(error.errno, error.strerror or str(error), str(folder))
        output_error.remedy = "Set XDG_CACHE_HOME to a folder you may write to"
        raise output_error from error


@dataclass(frozen=True)
class _BuildJob:
    folder: Path
    torch: TorchInstallation
    compiler: Compiler
    check: bool
    progress: BuildProgress

    def find(self) -> Path | None:
        """Return the library if it exists and works; one that does not work is removed."""
        start = f"{library_file.prefix(self.torch.version)}{library_file.source_hash()}-{self.compiler.key}-"
        for path in library_file.candidates(self.folder, self.torch.version):
            if path.name.startswith(start):
                if _defect(path, self.check) is None:
                    return path
                path.unlink(missing_ok=True)
        return None

    def make(self) -> Path:
        """Compile, link and check the library, and move it into the folder."""
        try:
            with tempfile.TemporaryDirectory(prefix="precast-build-") as work:
                name, content = self._make_in(Path(work))
        except OSError as error:  # of the temporary folder, or of a missing output file
            raise BuildError(f"the library could not be made: {error}") from error
        atomic_write.replace(self.folder / name, content, 0o755)
        (self.folder / LOG).unlink(missing_ok=True)  # of an earlier failure
        return self.folder / name

    def _make_in(self, work: Path) -> tuple[str, bytes]:
        """Return the library's name and content."""
        objects = sorted(work / f"{path.stem}.o" for path in library_file.SOURCES.glob("*.cpp"))
        steps = len(objects) + 2
        self.progress("compiling", 0, steps)
        # A compiler takes some hundred MB.
        with ThreadPoolExecutor(max(1, min(4, os.cpu_count() or 1))) as pool:
            for done, _ in enumerate(pool.map(self._compile, objects), 1):
                self.progress("compiling", done, steps)
        self.progress("linking", steps - 2, steps)
        output = work / "library.so"
        # PyTorch is loaded before the library, so these are found by name: the file contains no folder of this machine.
        libraries = [f"-L{self.torch.folder / 'lib'}", "-ltorch_cpu", "-lc10", "-ldl"]
        if sys.platform == "darwin":
            libraries = ["-undefined", "dynamic_lookup"]
        self._run_compiler([*_LINK, "-o", str(output), *map(str, objects), *libraries])
        self.progress("checking", steps - 1, steps)
        content = output.read_bytes()
        name = library_file.file_name(self.torch.version, self.compiler.key, content)
        defect = _defect(output.rename(work / name), self.check)
        if defect:
            raise BuildError(f"the library of {self.compiler.version} does not work: {defect}")
        return name, content

    def _compile(self, target: Path) -> None:
        include = self.torch.folder / "include"
        options = [
            *library_file.FLAGS,
            "-std=c++20",  # as PyTorch's own extensions
            "-D_GLIBCXX_USE_CXX11_ABI=1",  # that of all PyTorch wheels
            f"-ffile-prefix-map={include}=torch",  # messages must not name folders of this machine
            f"-ffile-prefix-map={library_file.SOURCES}=precast",
        ]
        for folder in (include, include / "torch" / "csrc" / "api" / "include"):
            options += ["-isystem", str(folder)]  # no warnings about PyTorch's headers
        source = library_file.SOURCES / f"{target.stem}.cpp"
        self._run_compiler([*options, "-c", str(source), "-o", str(target)])

    def _run_compiler(self, arguments: Sequence[str]) -> None:
        """Run the compiler; after an error its output is saved."""
        command = [*self.compiler.command, *arguments]
        done = _run(command)
        if done.returncode == 0:
            return
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        errors = [line for line in lines if re.search(r"\berror\b|undefined reference", line, re.I)]
        first = f": {(errors or lines)[0]}" if lines else " without a message"
        log, place = self.folder / LOG, f"its whole output is in {self.folder / LOG}"
        try:
            atomic_write.replace(log, f"{shlex.join(command)}\n{done.stdout}".encode())
        except OutputError as error:
            place = str(error)
        raise BuildError(f"{command[0]} {_exit_text(done.returncode)}{first}; {place}")


_LINK: Final = ("-shared", "-Wl,--no-undefined") if sys.platform == "linux" else ("-shared",)


def _exit_text(code: int) -> str:
    """Return the end of a sentence about how a process ended."""
    if code > 0:
        return f"failed with code {code}"
    name = signal.Signals(-code).name
    return f"was killed by {name}" + (" (is there enough memory?)" if name == "SIGKILL" else "")
