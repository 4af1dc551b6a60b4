"""The wheel that brings the native engine: what is in it, and that it runs where neither sources nor a compiler are.

It is made for the PyTorch that is installed here; `make wheel` makes one for all supported versions in the same way.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

import precast
from precast.weights.native import library_file
from tests.project.test_package import INFO, ROOT, contents, run, source_tree

VERSION = str(torch.__version__)
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="wheels with libraries are made on Linux"),
    pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler here"),
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "tools.native_library", "--wheel", "--out", str(out), VERSION]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [path] = out.iterdir()
    assert done.stdout.splitlines()[-1] == str(path)
    return path


def test_it_is_the_source_tree_and_a_library_and_says_for_which_platform(wheel: Path) -> None:
    assert wheel.name.startswith(f"precast-{precast.__version__}-py3-none-manylinux_2_")
    inside = contents(wheel)
    package = {name: data for name, data in inside.items() if not name.startswith(INFO)}
    [library] = set(package) - set(source_tree())
    assert Path(library).parent.as_posix() == "precast/weights/native/compiled"
    assert Path(library).name.startswith(library_file.prefix(VERSION))
    assert {name: data for name, data in package.items() if name != library} == source_tree()
    about = inside[f"{INFO}/WHEEL"].decode()
    assert "Root-Is-Purelib: false" in about
    assert f"Tag: py3-none-{wheel.stem.rpartition('-')[2]}\n" in about


_USE = """
import sys
import torch
import precast
from precast.weights.native import library

found = library.load()
with precast.autocast("cpu", dtype=torch.bfloat16):
    assert torch.ones(2, 2).mm(torch.ones(2, 2)).dtype is torch.bfloat16
print(library.chosen_engine(), getattr(found, "path", ""))
"""


def test_it_runs_on_the_native_engine_and_without_the_library_on_the_reference(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PRECAST_ENGINE", raising=False)
    run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], tmp_path)
    python = str(tmp_path / "venv" / "bin" / "python")
    install = ["install", "--quiet", "--no-deps", "--no-index", "--no-compile", str(wheel)]
    run([sys.executable, "-m", "pip", "--python", python, *install], tmp_path)
    site = run([python, "-c", "import sysconfig; print(sysconfig.get_path('platlib'))"], tmp_path)
    # What it depends on is taken from this environment; a `.pth` file inside of that one is not read.
    others = Path(site.strip(), "others.pth")
    others.write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    compiled = Path(site.strip(), "precast", "weights", "native", "compiled")
    [library] = compiled.iterdir()
    monkeypatch.setenv("PATH", os.devnull)  # no compiler
    used = [python, "-W", "error", "-c", _USE]
    assert run(used, tmp_path).split() == ["native", str(library)]
    library.unlink()
    assert run(used, tmp_path).split() == ["reference"]
