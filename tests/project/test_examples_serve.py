"""The recipe of `examples/serve`: its five commands run as they stand, and a program in C++ gives the same bits."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SERVE = Path(__file__).parents[2] / "examples" / "serve"
TORCH = Path(torch.__file__).parent
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor compiles with g++")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the commands have run."""
    folder = tmp_path_factory.mktemp("serve")
    shutil.copytree(SERVE, folder, dirs_exist_ok=True)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["sh", "commands.sh"],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (folder / "printed").write_text(done.stdout, encoding="utf-8")
    return folder


def answer(folder: Path) -> torch.Tensor:
    result: torch.Tensor = torch.load(folder / "answer.pt")
    return result


def test_the_five_commands_lead_to_an_answer_without_precast(served: Path) -> None:
    commands = (served / "commands.sh").read_text(encoding="utf-8").splitlines()[3:]
    assert len(commands) == 5
    printed = (served / "printed").read_text(encoding="utf-8")
    assert "weights in bfloat16: weight, bias" in printed
    assert "(8, 4) in torch.bfloat16, precast imported: False" in printed


def test_the_recipe_prints_these_commands() -> None:
    commands = (SERVE / "commands.sh").read_text(encoding="utf-8").partition("set -e\n")[2]
    for page in ("serve.md", "serve.zh.md"):
        text = (SERVE.parents[1] / "docs" / "recipes" / page).read_text(encoding="utf-8")
        assert f"```text\n{commands}```" in text


def test_the_package_gives_the_bits_of_the_program(served: Path) -> None:
    program = torch.export.load(served / "classifier.pt2").module()
    assert torch.equal(answer(served), program(torch.load(served / "points.pt")))


def test_a_program_in_cpp_gives_the_bits_of_python(served: Path) -> None:
    if not (TORCH / "include/torch/csrc/inductor/aoti_package").is_dir():
        pytest.skip("this PyTorch comes without headers")
    headers = [f"-I{TORCH / 'include'}", f"-I{TORCH / 'include/torch/csrc/api/include'}"]
    libraries = [f"-L{TORCH / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    result = [f"-Wl,-rpath,{TORCH / 'lib'}"]
    compiler = ["g++", "-std=c++20", "-O0", "serve.cpp", "-o", "serve"]
    subprocess.run([*compiler, *headers, *libraries, *result], cwd=served, check=True)
    names = ["classifier.aoti.pt2", "points.pt", "cpp.pt"]
    subprocess.run(["./serve", *names], cwd=served, check=True, stdout=subprocess.DEVNULL)
    assert torch.equal(torch.load(served / "cpp.pt"), answer(served))
