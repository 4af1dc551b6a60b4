"""The native engine's library: compiled, kept, found and loaded; and each way in which that fails, provoked.

Compilers are mostly scripts here: one gives what the real one gave once, the others fail in their ways.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from precast.cli import build
from precast.cli.main import main
from precast.errors import BuildError, OutputError, PrecastError, PrecastWarning, TorchVersionError
from precast.weights.native import library, library_file
from precast.weights.native.library import Library, Unavailable
from tools import native_boundary

ROOT = Path(__file__).parents[2]
VERSION = str(torch.__version__)
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler here")
on_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="what is said is the linker's of Linux"
)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, a package without libraries, and no wish for a compiler or an engine."""
    monkeypatch.setattr(library_file, "COMPILED", tmp_path / "compiled")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("CXX", "PRECAST_ENGINE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache" / "precast"


@pytest.fixture(autouse=True)
def _looks_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`load` answers for the folders of this test."""
    library._find_once.cache_clear()
    yield
    library._find_once.cache_clear()


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that works; one that `make` has put into the package will do."""
    shipped = Path(library_file.SOURCES, "compiled")
    for path in library_file.candidates(shipped, VERSION):
        if library_file.refusal(path) is None:
            return path
    return build.build(tmp_path_factory.mktemp("real")).path


def script(folder: Path, text: str) -> str:
    """A program of the shell's; what it is given as `-o` is its `$out`."""
    path = folder / "compiler"
    path.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --version ]; then echo "fake 1.0"; exit 0; fi\n'
        'last= out= linking=\nfor word in "$@"; do\n'
        '    [ "$last" = -o ] && out=$word\n    [ "$word" = -shared ] && linking=yes\n    last=$word\ndone\n'
        f"{text}\n"
    )
    path.chmod(0o755)
    return str(path)


def gives(made: Path) -> str:
    return f'if [ "$linking" ]; then cp "{made}" "$out"; else : > "$out"; fi'


def libraries(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name not in {".lock", build.LOG})


def precast_build(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["build", *arguments])


def one_line(result: Result) -> str:
    assert (result.exit_code, result.stdout) == (1, ""), result.output
    [line] = result.stderr.splitlines()
    return line.removeprefix("Error: ")


def kept(folder: Path, content: bytes, *, name: str = "") -> Path:
    """A file in a folder that is called as a library with this content is."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / (name or library_file.file_name(VERSION, "12345678", content))
    path.write_bytes(content)
    return path


def unavailable() -> Unavailable:
    found = library.load()
    assert isinstance(found, Unavailable)
    return found


# --- what works ---


PRECAST = """
import sys
from pathlib import Path
from precast.cli.main import main
from precast.weights.native import library, library_file
assert "torch" not in sys.modules
library_file.COMPILED = Path("/nowhere")  # a package without libraries
"""


def program(text: str = "main()", *arguments: str) -> list[str]:
    """A command that runs Python of this environment; without a text the command `precast`."""
    return [sys.executable, "-c", PRECAST + text, *arguments]


@needs_compiler
def test_what_is_compiled_is_kept_found_and_loaded(cache: Path) -> None:
    """In a process of its own, as a library stays loaded: compiled once, found the second time, used the third."""
    first, second = (
        json.loads(subprocess.check_output(program("main()", "build", "--json"), text=True))
        for _ in range(2)
    )
    assert [str(path) for path in libraries(cache)] == [first["path"]]
    assert (first["torch"], first["is_new"]) == (VERSION, True)
    assert second == {**first, "is_new": False}
    code = (
        "found = library.load(); assert found is library.load(); print(found.path, library.chosen_engine())\n"
        "print(found.functions.precast_native_probe())"
    )
    used = subprocess.check_output(program(code), text=True, cwd=cache)
    assert used.split() == [first["path"], "native", "None"]


@needs_compiler
def test_the_command_says_what_it_did_and_where(
    cache: Path, real: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", script(tmp_path, gives(real)))
    first, second = precast_build(), precast_build()
    assert (first.exit_code, first.stderr) == (0, "")
    [path] = libraries(cache)
    assert first.stdout == f"compiled for PyTorch {VERSION} by fake 1.0\n{path}\n"
    assert second.stdout == f"already compiled for PyTorch {VERSION}\n{path}\n"
    assert path.read_bytes() == real.read_bytes()


@needs_compiler
def test_a_library_in_the_package_needs_no_compiler(
    real: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(real.parent, library_file.COMPILED)
    monkeypatch.setenv("PATH", "")
    built = build.build()
    assert (built.path.name, built.is_new, built.compiler) == (real.name, False, None)
    assert not cache.exists()


@needs_compiler
def test_a_library_names_no_folder_of_this_machine_and_needs_no_python(real: Path) -> None:
    content = real.read_bytes()
    assert str(Path(torch.__file__).parent).encode() not in content
    assert str(ROOT).encode() not in content
    assert b"libpython" not in content
    assert b"libtorch_python" not in content
    assert b"PyObject_" not in content


@needs_compiler
def test_two_processes_build_one_after_the_other(cache: Path, real: Path, tmp_path: Path) -> None:
    compiler = script(tmp_path, f'echo $$ >> "{tmp_path}/calls"; sleep 0.5; {gives(real)}')
    command = program("main()", "build", "--json")
    environment = os.environ | {"CXX": compiler}
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) for _ in range(2)]
    said = [json.loads(process.communicate()[0]) for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert sorted(one["is_new"] for one in said) == [False, True]
    assert len(libraries(cache)) == 1
    calls = (tmp_path / "calls").read_text().split()
    assert len(calls) == len(list(library_file.SOURCES.glob("*.cpp"))) + 1


@needs_compiler
def test_a_process_that_is_killed_while_it_builds_leaves_no_library_and_no_lock(
    cache: Path, real: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = script(tmp_path, f'echo > "{tmp_path}/started"; sleep 60')
    command = program("main()", "build")
    environment = os.environ | {"CXX": slow, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    while not (tmp_path / "started").exists():
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert libraries(cache) == []
    monkeypatch.setenv("CXX", script(tmp_path, gives(real)))
    assert precast_build().exit_code == 0
    assert len(libraries(cache)) == 1


# --- compilers that fail ---


def test_without_a_compiler_the_command_says_so(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    monkeypatch.setenv("PATH", "")
    said = one_line(precast_build())
    assert said.startswith("no C++ compiler was found (CXX is not set; tried c++, g++, clang++).")
    assert said.endswith("the reference engine runs")
    assert not cache.exists()


def test_a_compiler_that_makes_nothing_is_one_line(
    monkeypatch: pytest.MonkeyPatch, cache: Path, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", script(tmp_path, "exit 0"))
    assert one_line(precast_build()).startswith("the library could not be made: [Errno 2] No such")
    assert libraries(cache) == []


def test_a_compiler_that_is_no_command_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++ 'half")
    assert one_line(precast_build()).endswith("which is no command: No closing quotation")


def test_a_compiler_that_is_named_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-g++ -O3")
    assert "CXX is 'no-such-g++ -O3', and there is no such compiler" in one_line(precast_build())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("#!/bin/sh\nexit 3", "does not work: --version failed with code 3"),
        ("#!/no/such/shell", "cannot be run: No such file or directory"),
        ("#!/bin/sh\nkill -9 $$", "does not work: --version was killed by SIGKILL"),
    ],
)
def test_a_compiler_that_does_not_run(
    text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(text)
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert says in one_line(precast_build())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "echo note: first; echo 'abi.cpp:7:1: error: no such thing'; echo and more >&2; exit 1",
            "failed with code 1: abi.cpp:7:1: error: no such thing; ",
        ),
        ("kill -9 $$", "was killed by SIGKILL (is there enough memory?) without a message; "),
        ("exit 4", "failed with code 4 without a message; "),
        (
            'if [ "$linking" ]; then echo "x: undefined reference to y"; exit 1; else : > "$out"; fi',
            "failed with code 1: x: undefined reference to y; ",
        ),
    ],
)
def test_a_compiler_that_fails_leaves_a_log_and_nothing_else(
    text: str, says: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", script(tmp_path, text))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    line = one_line(precast_build())
    assert says in line
    log = cache / build.LOG
    assert line.endswith(f"its whole output is in {log}")
    assert log.read_text().startswith(str(tmp_path / "compiler"))
    assert ("and more" in log.read_text()) == ("and more" in text)
    assert libraries(cache) == []
    assert not list(tmp_path.glob("precast-build-*"))
    assert unavailable() == Unavailable(
        f"no library has been compiled for PyTorch {VERSION} on this machine"
    )


@needs_compiler
@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("__attribute__((constructor)) static void begin() { abort(); }", "SIGABRT"),
        ('extern "C" void missing(); void use() { missing(); }', "undefined symbol: missing"),
        ("", "undefined symbol: precast_native_probe"),
        (
            'extern "C" const char* precast_native_probe() { return "the sizes are wrong"; }',
            "must not be used: the sizes are wrong",
        ),
    ],
    ids=["it crashes", "a missing symbol", "no functions", "the probe refuses"],
)
def test_what_does_not_work_when_it_is_loaded_is_never_kept(
    source: str, says: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = compiled(source, tmp_path)
    monkeypatch.setenv("CXX", script(tmp_path, gives(made)))
    line = one_line(precast_build())
    assert line.startswith("the library of fake 1.0 does not work: ")
    assert says in line
    assert libraries(cache) == []
    # Put there all the same, it is refused when it is loaded; the one that crashes would end this process.
    if "constructor" not in source:
        kept(cache, made.read_bytes())
        found = unavailable()
        assert found.is_refused
        assert says in found.reason


def compiled(source: str, folder: Path) -> Path:
    """A small library of no use."""
    (folder / "small.cpp").write_text(f"#include <cstdlib>\n{source}\n")
    made = folder / "small.so"
    flags = ["-shared", "-fPIC", "-o", str(made), str(folder / "small.cpp")]
    subprocess.run([str(COMPILER), *flags], check=True)
    return made


@needs_compiler
@on_linux
def test_headers_that_are_not_those_of_the_loaded_pytorch_are_noticed_by_the_probe(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a tensor two numbers of the same size change places: what is compiled reads one for the other."""
    (tmp_path / "sources").mkdir()
    shutil.copy(library_file.SOURCES / "abi.cpp", tmp_path / "sources")
    monkeypatch.setattr(
        library_file, "SOURCES", tmp_path / "sources"
    )  # the others have no part in it
    installed = build.installed_torch()
    other = tmp_path / "torch"
    shutil.copytree(installed.folder / "include" / "c10", other / "include" / "c10")
    for path in (installed.folder / "include").iterdir():
        if path.name != "c10":
            (other / "include" / path.name).symlink_to(path)
    (other / "lib").symlink_to(installed.folder / "lib")
    header = other / "include" / "c10" / "core" / "TensorImpl.h"
    text = header.read_text(encoding="utf-8")
    text = text.replace("int64_t storage_offset_ = 0;", "int64_t ELSEWHERE = 1;")
    text = text.replace("int64_t numel_ = 1;", "int64_t storage_offset_ = 0;")
    header.write_text(text.replace("ELSEWHERE", "numel_"), encoding="utf-8")
    with pytest.raises(
        BuildError, match="must not be used: the loaded PyTorch differs from its headers"
    ):
        build.build(torch=build.TorchInstallation(VERSION, other))
    assert libraries(cache) == []


# --- folders ---


@pytest.mark.parametrize("where", ["a file", "proc"])
@pytest.mark.skipif(
    not Path("/proc/self").exists(), reason="there is no folder that not even root may write to"
)
def test_a_cache_that_cannot_be_written_is_one_line(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    folder = str(tmp_path / "file") if where == "a file" else "/proc/self"
    monkeypatch.setenv("XDG_CACHE_HOME", folder)
    monkeypatch.setenv("CXX", script(tmp_path, "exit 1"))
    line = one_line(precast_build())
    assert line.startswith(f"cannot write {folder}/precast: ")
    assert line.endswith("Set XDG_CACHE_HOME to a folder you may write to")
    assert not unavailable().is_refused


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_without_permission_is_one_line(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir(parents=True)
    cache.chmod(stat.S_IRUSR | stat.S_IXUSR)
    monkeypatch.setenv("CXX", script(tmp_path, "exit 1"))
    assert "Permission denied" in one_line(precast_build())


@needs_compiler
def test_a_disk_that_is_full_leaves_nothing(
    cache: Path, real: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    monkeypatch.setenv("CXX", script(tmp_path, gives(real)))
    with pytest.raises(OutputError, match="No space left on device"):
        build.build(check=False)
    assert libraries(cache) == []


def test_the_cache_is_where_its_specification_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert library_file.cache_folder() == tmp_path / "cache" / "precast"
    for ignored in ("", "not/absolute"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert library_file.cache_folder() == tmp_path / ".cache" / "precast"
    monkeypatch.setattr("sys.platform", "darwin")
    assert library_file.cache_folder() == tmp_path / "Library" / "Caches" / "precast"


def test_without_a_home_directory_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setenv("CXX", "true")
    assert "set XDG_CACHE_HOME" in one_line(precast_build())
    assert not unavailable().is_refused


# --- files that must not be loaded ---


def damaged(content: bytes) -> dict[str, bytes]:
    return {
        "half of it": content[: len(content) // 2],
        "zeros at the end": content[:-100] + bytes(100),
        "one bit": content[:200] + bytes([content[200] ^ 1]) + content[201:],
        "nothing": b"",
    }


@pytest.mark.parametrize("what", ["half of it", "zeros at the end", "one bit", "nothing"])
def test_a_damaged_file_is_refused_before_it_is_loaded(what: str, cache: Path) -> None:
    good = bytes(range(256)) * 40
    path = kept(cache, damaged(good)[what], name=library_file.file_name(VERSION, "1", good))
    found = unavailable()
    assert found.is_refused
    assert (
        found.reason == f"{path} is damaged or half written: its content is not what its name says"
    )
    assert found.remedy == "precast build"


def test_a_file_of_another_name_is_refused(cache: Path) -> None:
    path = kept(cache, b"content")
    path = path.rename(path.with_name(path.name.replace("12345678", "87654321")))
    assert unavailable().reason.startswith(f"{path} is damaged")


def test_libraries_of_other_versions_are_passed_over(cache: Path) -> None:
    for name in ("precast-torch2.99-linux_x86_64-a-b-c.so", "another.so", "precast"):
        kept(cache, b"anything", name=name)
    assert not unavailable().is_refused
    older = kept(cache, b"", name=f"{library_file.prefix(VERSION)}0123456789abcdef-1-2.so")
    assert unavailable_again() == Unavailable(
        f"{older} was compiled from the sources of another version of precast"
    )


def unavailable_again() -> Unavailable:
    library._find_once.cache_clear()
    return unavailable()


@needs_compiler
def test_a_damaged_library_is_replaced_by_the_next_build(
    cache: Path, real: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", script(tmp_path, gives(real)))
    path = build.build(check=False).path
    path.write_bytes(real.read_bytes()[:5000])
    assert unavailable().is_refused
    again = build.build(check=False)
    assert (again.path, again.is_new) == (path, True)
    assert library_file.refusal(path) is None


@pytest.mark.parametrize(
    ("version", "key"),
    [
        ("2.13.0", "2.13"),
        ("2.13.1+cu130", "2.13"),
        ("2.13.0.post1", "2.13"),
        ("2.15.0a0+git1234", "2.15.0a0+git1234"),
        ("2.15.0.dev20261101+cpu", "2.15.0.dev20261101+cpu"),
        ("2.15.0rc2", "2.15.0rc2"),
    ],
)
def test_one_library_is_for_all_builds_of_a_release(version: str, key: str) -> None:
    assert library_file.torch_key(version) == key


# --- which engine ---


def test_the_environment_chooses_the_engine(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    assert library.chosen_engine() == "reference"
    monkeypatch.setenv("PRECAST_ENGINE", "native")
    with pytest.raises(
        PrecastError, match=r"PRECAST_ENGINE is .native., but no library .* precast build$"
    ):
        library.chosen_engine()
    monkeypatch.setenv("PRECAST_ENGINE", "fast")
    with pytest.raises(PrecastError, match=r"'fast'\. Allowed: reference, native"):
        library.chosen_engine()
    works = Library(cache, None)  # type: ignore[arg-type]
    monkeypatch.setattr(library, "load", lambda: works)
    monkeypatch.setenv("PRECAST_ENGINE", "reference")
    assert library.chosen_engine() == "reference"
    monkeypatch.delenv("PRECAST_ENGINE")
    assert library.chosen_engine() == "native"


def test_a_library_that_is_refused_is_told_of_and_one_that_is_not_there_is_not(cache: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert library.chosen_engine() == "reference"
    kept(cache, b"half", name=library_file.file_name(VERSION, "1", b"whole"))
    library._find_once.cache_clear()
    with pytest.warns(
        PrecastWarning, match=r"^The reference engine is used: .* half written.* precast build$"
    ):
        assert library.chosen_engine() == "reference"


def test_there_is_none_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "win32")
    found = unavailable()
    assert str(found) == "the native engine is not built on Windows."
    with pytest.raises(BuildError, match="reference engine runs there"):
        build.build()


def test_a_pytorch_without_headers_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        BuildError, match=re.escape(f"the version of the PyTorch in {tmp_path} cannot be read")
    ):
        build.torch_in(tmp_path)
    (tmp_path / "version.py").write_text("__version__ = '2.13.0'\n")
    with pytest.raises(BuildError, match="has no headers to compile with"):
        build.torch_in(tmp_path)


def test_a_pytorch_that_is_too_old_is_refused_before_anything_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "torch_in", lambda folder: build.TorchInstallation("2.2.2", folder))
    with pytest.raises(TorchVersionError, match=r"PyTorch 2\.2\.2 is installed"):
        build.build()


def test_python_without_a_gil_runs_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    assert str(unavailable()) == "this Python runs without a GIL, which the native engine needs."


def test_a_library_that_is_only_loaded_registers_nothing(real: Path) -> None:
    """As one is that its probe refuses."""
    program = (
        "import ctypes, sys, torch\n"
        "library = ctypes.PyDLL(sys.argv[1])\n"
        "sys.exit(7 if hasattr(torch.ops.precast_native, 'copy_of') else 0)"
    )
    subprocess.run([sys.executable, "-c", program, str(real)], check=True)


def test_the_header_is_that_of_the_declarations() -> None:
    assert native_boundary.TARGET.read_text(encoding="utf-8") == native_boundary.header()
