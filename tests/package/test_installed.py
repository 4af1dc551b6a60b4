"""precast as users install it: the wheel and what it depends on in an empty environment, from pip and nothing else.

`make test-package` runs these tests; pip has to reach its index.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import precast
from tests.project.test_package import LINT, ROOT, Built, contents, made, run
from tests.support.pages import blocks

README, START = ROOT / "README.md", ROOT / "docs" / "start.md"
CONSTRAINTS = ["--constraint", str(ROOT / "constraints.txt")]
# PyTorch says so itself, when it is imported where there is no NumPy. Nothing of precast needs NumPy.
WITHOUT_NUMPY = ["-W", "error", "-W", "ignore:Failed to initialize NumPy:UserWarning"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return made(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def programs(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment into which the wheel was installed, and nothing else."""
    folder = tmp_path_factory.mktemp("empty")
    run([sys.executable, "-m", "venv", str(folder)], folder)
    pip = [str(folder / "bin" / "pip"), "install", "-q", "--no-compile"]
    run([*pip, *CONSTRAINTS, str(built.wheel)], folder)
    return folder / "bin"


def page(path: Path) -> str:
    """The Python of a page as one program; a line that raises is told to."""
    text = "\n\n".join(block for _, block in blocks(path, "python"))
    return re.sub(
        r"^(\S.*?) {2}# raises (\w+):.*$", r"try:\n    \1\nexcept \2:\n    pass", text, flags=re.M
    )


def test_the_command_and_the_readme_need_nothing_more(programs: Path, tmp_path: Path) -> None:
    command = str(programs / "precast")
    assert run([command, "--version"], tmp_path) == f"precast, version {precast.__version__}\n"
    (tmp_path / "readme.py").write_text(page(README), encoding="utf-8")
    reports = subprocess.run(
        [command, "check", "readme.py"], capture_output=True, text=True, check=False
    )
    assert reports.returncode == 1
    assert "pip install . ./lint" in reports.stderr
    run([str(programs / "python"), *WITHOUT_NUMPY, "readme.py"], tmp_path)
    code = "import precast; print(precast.__file__)"
    home = run([str(programs / "python"), "-c", code], tmp_path).strip()
    assert Path(home).is_relative_to(programs.parent)


def test_the_checker_needs_no_pytorch_and_is_found_by_precast_where_both_are(
    programs: Path, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    checker = made(tmp_path_factory.mktemp("lint"), LINT)
    run([sys.executable, "-m", "venv", str(tmp_path / "alone")], tmp_path)
    alone = tmp_path / "alone" / "bin"
    (tmp_path / "readme.py").write_text(page(README), encoding="utf-8")
    for source in (checker.wheel, checker.sdist):
        pip = [str(alone / "pip"), "install", "-q", "--no-compile", "--force-reinstall"]
        run([*pip, *CONSTRAINTS, str(source)], tmp_path)
        run([str(alone / "precast-lint"), "check", "readme.py"], tmp_path)
    there = run([str(alone / "pip"), "list", "--format=freeze"], tmp_path)
    assert not re.search("^(torch|precast)==", there, re.M)
    assert re.search("^precast-lint==", there, re.M)
    # Beside precast it is its commands: the environment of the other tests stays as it is.
    site = run([str(alone / "python"), "-c", "import click; print(click.__path__[0])"], tmp_path)
    both = {"PYTHONPATH": str(Path(site.strip()).parent)}
    result = subprocess.run(
        [str(programs / "precast"), "check", "readme.py"],
        cwd=tmp_path,
        env=both,
        check=False,
    )
    assert result.returncode == 0


def test_the_source_distribution_installs_the_same(
    built: Built, programs: Path, tmp_path: Path
) -> None:
    pip = [str(programs / "pip"), "install", "-q", "--no-deps", "--no-compile"]
    run([*pip, *CONSTRAINTS, "--target", str(tmp_path / "site"), str(built.sdist)], tmp_path)
    package = {n: data for n, data in contents(built.wheel).items() if n.startswith("precast/")}
    site = tmp_path / "site"
    files = (path for path in (site / "precast").rglob("*") if path.is_file())
    assert {p.relative_to(site).as_posix(): p.read_bytes() for p in files} == package


# --- types ---

TYPED = """
from typing import assert_type

import torch
from torch import Tensor, nn

import precast


@precast.autocast("cuda", dtype=torch.bfloat16)
def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    return loss


def train(model: nn.Module, batches: list[Tensor]) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = precast.GradScaler("cuda", init_scale="auto")
    policy = precast.Policy.load("default").replace(ops={"softmax.int": "fp32"})
    losses = []
    with precast.attach(model, policy), precast.trace(model) as trace, precast.monitor(model):
        for batch in batches:
            loss = assert_type(loss_of(model, batch), Tensor)
            assert_type(scaler.scale(loss), Tensor).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
    assert_type(trace, precast.Trace)
    assert_type(scaler.last_step(optimizer), precast.events.StepEvent | None)
    return losses
"""
WRONG = {
    'precast.autocast("cpu", dtype=16)': "arg-type",
    "precast.autocat": "attr-defined",
    "precast.Policy.load(1)": "arg-type",
}
SETTINGS = "[mypy]\nstrict = true\nuntyped_calls_exclude = torch\n[mypy-sklearn.*]\nignore_missing_imports = true\n"
UNTYPED = "allow_untyped_defs = true\nallow_untyped_calls = true\nallow_incomplete_defs = true\n"


def types(programs: Path, folder: Path, program: str, settings: str = SETTINGS) -> str:
    """Return mypy's output for a program outside of the source tree, which sees the installed precast."""
    (folder / "program.py").write_text(program, encoding="utf-8")
    (folder / "mypy.ini").write_text(settings, encoding="utf-8")
    result = [
        "--python-executable",
        str(programs / "python"),
        "--cache-dir",
        str(programs / "mypy"),
    ]
    command = [sys.executable, "-m", "mypy", "--no-error-summary", *result, "program.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("path", [README, START], ids=lambda path: path.name)
def test_a_type_checker_accepts_the_programs_of_a_page(
    path: Path, programs: Path, tmp_path: Path
) -> None:
    # Their functions have no annotations; what is in them is checked all the same.
    settings = SETTINGS.replace("strict = true\n", f"strict = true\n{UNTYPED}")
    assert types(programs, tmp_path, page(path), settings) == ""


def test_a_strict_type_checker_accepts_a_typed_program(programs: Path, tmp_path: Path) -> None:
    assert types(programs, tmp_path, TYPED) == ""


def test_a_type_checker_sees_what_is_wrong(programs: Path, tmp_path: Path) -> None:
    message = types(programs, tmp_path, "\n".join(["import precast", *WRONG])).splitlines()
    assert len(message) == len(WRONG)
    for number, (line, code) in enumerate(zip(message, WRONG.values(), strict=True), 2):
        assert line.startswith(f"program.py:{number}: error:")
        assert line.endswith(f"[{code}]")
