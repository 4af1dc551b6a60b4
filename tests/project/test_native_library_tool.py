"""`python -m tools.native_library`: for which versions a wheel is, what it says of its platform, and no compiler."""

from __future__ import annotations

import platform
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from precast.cli import build
from precast.errors import BuildError
from precast.weights.native import library_file
from tools import native_library

LINUX = pytest.mark.skipif(
    sys.platform != "linux", reason="wheels with libraries are made on Linux"
)


def test_a_wheel_is_for_the_newest_release_of_each_supported_version() -> None:
    result = ["2.99.0", "2.15.0", "2.9.1", "2.14.0", "2.14.1", "2.14.10", "2.11.0"]
    assert native_library.newest_of_each(result) == ["2.11.0", "2.14.10", "2.15.0"]


@LINUX
@pytest.mark.parametrize(
    ("symbols", "glibc"),
    [
        ("GLIBC_2.2.5 GLIBCXX_3.4.21 CXXABI_1.3.9", "2_28"),
        ("GLIBC_2.32 GLIBCXX_3.4.9", "2_32"),
        ("GLIBC_2.14 GLIBCXX_3.4.29", "2_34"),
        ("GLIBC_2.36 GLIBCXX_3.4.30", "2_36"),
    ],
)
def test_the_platform_is_what_the_symbols_need(
    symbols: str, glibc: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = "".join(
        f"  0x0010:   Name: {name}  Flags: none  Version: 3\n" for name in symbols.split()
    )
    monkeypatch.setattr(subprocess, "check_output", lambda *_, **__: message)
    expected = f"manylinux_{glibc}_{platform.machine()}"
    assert native_library.platform_tag([Path("a.so")]) == expected


def test_without_a_compiler_make_goes_on_and_tries_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert native_library.main(["--stamp", str(tmp_path / "stamp")]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "no C++ compiler: the native engine is left out, and the reference engine runs"
    ]
    assert not (tmp_path / "stamp").exists()


def test_a_compiler_that_fails_is_an_error_of_make(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise BuildError("c++ failed")

    monkeypatch.setattr(build, "find_compiler", lambda: build.Compiler(("c++",), "1"))
    monkeypatch.setattr(build, "build", fails)
    assert native_library.main(["--stamp", str(tmp_path / "stamp")]) == 1
    assert capsys.readouterr().err.strip() == "Error: c++ failed"
    assert not (tmp_path / "stamp").exists()


def test_the_package_keeps_one_library_for_each_pytorch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(library_file, "COMPILED", tmp_path)
    start = library_file.prefix("2.13.0")
    names = [f"{start}new-1-1.so", f"{start}old-1-1.so", f"{library_file.prefix('2.12.0')}a.so"]
    for name in names:
        (tmp_path / name).touch()
    built = build.BuildResult(tmp_path / names[0], "2.13.0", "1", is_new=True)
    monkeypatch.setattr(build, "find_compiler", lambda: build.Compiler(("c++",), "1"))
    monkeypatch.setattr(build, "build", lambda *_, **__: built)
    assert native_library.main(["--stamp", str(tmp_path / "stamp")]) == 0
    assert sorted(path.name for path in tmp_path.glob("*.so")) == sorted([names[0], names[2]])
    assert (tmp_path / "stamp").exists()


def test_of_another_pytorch_its_headers_and_two_libraries_are_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def download(command: list[str], **_: Any) -> SimpleNamespace:
        assert command[-1] == "torch==2.14.1"
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "torch-2.14.1.whl", "w") as archive:
            for name in ("include/ATen/ATen.h", "lib/libc10.so", "lib/libtorch_cuda.so", "nn.py"):
                archive.writestr(f"torch/{name}", "")
            archive.writestr("torch/version.py", "__version__ = '2.14.1+cu130'\n")
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(native_library, "ROOT", tmp_path)
    monkeypatch.setattr(native_library, "UNPACKED", tmp_path / "headers")
    monkeypatch.setattr(subprocess, "run", download)
    folder = native_library.unpack("2.14.1")
    assert build.torch_in(folder) == build.TorchInstallation("2.14.1+cu130", folder)
    names = {path.name for path in folder.rglob("*") if path.is_file()}
    assert names == {"ATen.h", "libc10.so", "version.py"}
    monkeypatch.setattr(subprocess, "run", None)  # the second time nothing is downloaded
    assert native_library.unpack("2.14.1") == folder
