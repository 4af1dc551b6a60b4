"""The checker with the packages that it names, and nothing else: as pip, pipx and pre-commit install it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from precast_lint.torch_versions import NEWEST

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "lint" / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PAGE = (ROOT / "docs" / "check.md").read_text(encoding="utf-8")
OLD = "import torch\n\nwith torch.cuda.amp.autocast():\n    pass\n"
NEW = 'import torch\n\nwith torch.amp.autocast("cuda"):\n    pass\n'
NEEDED = [re.split(r"[<>=]", text)[0] for text in PROJECT["dependencies"]]
HOOKS: list[dict[str, Any]] = yaml.safe_load(
    (ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8")
)


def _hooks_of_the_page() -> list[dict[str, Any]]:
    [block] = re.findall(r"```yaml\n(repos:\n.*?)```", PAGE, re.S)
    [repository] = yaml.safe_load(block)["repos"]
    assert repository["repo"] == "local"
    return list(repository["hooks"])


@pytest.fixture
def alone(tmp_path: Path) -> dict[str, str]:
    """An environment for `python -S` in which these packages are, and nothing else."""
    site = tmp_path / "site"
    site.mkdir()
    for name in ["precast_lint", *NEEDED]:
        spec = find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        (site / name).symlink_to(Path(spec.origin).parent, target_is_directory=True)
    return {"PATH": os.environ["PATH"], "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}


def run(
    environment: dict[str, str], folder: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-S", "-m", "precast_lint", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_check_fix_and_rule_work_with_these_packages_alone(
    alone: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "a.py").write_text(OLD)
    cells = '{"cells": [{"cell_type": "code", "source": "import apex.amp\\napex.amp.init()"}]}'
    (tmp_path / "b.ipynb").write_text(cells)
    result = run(alone, tmp_path, "check", "--jobs", "2", "a.py", "b.ipynb")
    assert result.returncode == 1, result.stderr
    assert "AMP001" in result.stdout
    assert "AMP009" in result.stdout
    assert run(alone, tmp_path, "check", "--fix", "a.py").returncode == 0
    assert (tmp_path / "a.py").read_text() == NEW
    for arguments in (
        ["check", "--explain", "ALL"],
        ["check", "--explain", "AMP203"],
        ["--version"],
    ):
        done = run(alone, tmp_path, *arguments)
        assert done.returncode == 0, done.stderr


def test_what_is_left_out_is_really_not_there(alone: dict[str, str], tmp_path: Path) -> None:
    names = ("torch", "precast", "rich", "yaml")
    code = f"import importlib.util as u; print([n for n in {names} if u.find_spec(n)])"
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(
        command, cwd=tmp_path, env=alone, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("hook", [*HOOKS, *_hooks_of_the_page()], ids=lambda hook: hook["id"])
def test_the_hooks_call_what_works(
    hook: dict[str, Any], alone: dict[str, str], tmp_path: Path
) -> None:
    """pre-commit runs a hook's entry with the names of files after it."""
    program, *arguments = hook["entry"].split()
    assert program == PROJECT["name"] in PROJECT["scripts"]
    (tmp_path / "a.py").write_text(OLD)
    (tmp_path / "b.py").write_text("print()\n")
    done = run(alone, tmp_path, *arguments, "a.py", "b.py")
    if hook["id"] == "precast-check":
        assert done.returncode == 1
        assert (tmp_path / "a.py").read_text() == OLD
    else:  # pre-commit itself fails a hook that changes files
        assert done.returncode == 0
        assert (tmp_path / "a.py").read_text() == NEW
    assert (
        run(alone, tmp_path, *arguments, "a.py" if done.returncode == 0 else "b.py").returncode == 0
    )


def test_a_hook_installs_the_checker_or_nothing() -> None:
    """pre-commit would install the root of this repository, and PyTorch, for a hook in the language `python`."""
    assert all(hook["language"] == "system" for hook in HOOKS)
    assert all("additional_dependencies" not in hook for hook in HOOKS)
    shown = _hooks_of_the_page()
    assert {hook["id"] for hook in shown} == {hook["id"] for hook in HOOKS}
    for hook in shown:
        assert hook["language"] == "python"
        assert hook["additional_dependencies"] == [PROJECT["name"]]


def test_the_checker_needs_neither_pytorch_nor_precast() -> None:
    optional = [text for extra in PROJECT["optional-dependencies"].values() for text in extra]
    assert NEEDED == ["click", "libcst"]
    assert not [text for text in optional if re.match(r"torch|precast", text)]


def test_the_checker_knows_every_pytorch_that_precast_runs_on() -> None:
    from precast._internal import torch_versions

    assert torch_versions.NEWEST == NEWEST


def test_both_distributions_have_the_same_licence() -> None:
    assert (ROOT / "lint" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
