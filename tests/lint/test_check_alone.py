"""The checker without PyTorch, and all else that it does not need: as pipx and pre-commit install it."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
OLD = "import torch\n\nwith torch.cuda.amp.autocast():\n    pass\n"
NEW = 'import torch\n\nwith torch.amp.autocast("cuda"):\n    pass\n'
HOOKS = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
NEEDED = ["click", "libcst"]  # what docs/check.md and the hooks name


@pytest.fixture
def alone(tmp_path: Path) -> dict[str, str]:
    """An environment for `python -S` in which these packages are, and nothing else."""
    site = tmp_path / "site"
    site.mkdir()
    for name in ["precast", *NEEDED]:
        spec = find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        (site / name).symlink_to(Path(spec.origin).parent, target_is_directory=True)
    return {"PATH": os.environ["PATH"], "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}


def run(
    environment: dict[str, str], folder: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-S", "-m", "precast", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_check_fix_and_rule_work_with_these_packages_alone(
    alone: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "a.py").write_text(OLD)
    cells = '{"cells": [{"cell_type": "code", "source": "import apex.amp\\napex.amp.init()"}]}'
    (tmp_path / "b.ipynb").write_text(cells)
    found = run(alone, tmp_path, "check", "--jobs", "2", "a.py", "b.ipynb")
    assert found.returncode == 1, found.stderr
    assert "AMP001" in found.stdout
    assert "AMP009" in found.stdout
    assert run(alone, tmp_path, "fix", "a.py").returncode == 0
    assert (tmp_path / "a.py").read_text() == NEW
    for arguments in (["rule"], ["rule", "AMP203"], ["check", "--help"], ["--version"]):
        done = run(alone, tmp_path, *arguments)
        assert done.returncode == 0, done.stderr


def test_what_is_left_out_is_really_not_there(alone: dict[str, str], tmp_path: Path) -> None:
    code = "import importlib.util as u; print([n for n in ('torch', 'rich', 'yaml') if u.find_spec(n)])"
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, env=alone, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook["id"])
def test_the_hooks_call_what_works(
    hook: dict[str, object], alone: dict[str, str], tmp_path: Path
) -> None:
    """pre-commit runs a hook's entry with the names of files after it."""
    assert hook["language"] == "python"
    assert [str(d).partition(">")[0] for d in hook["additional_dependencies"]] == NEEDED  # type: ignore[attr-defined]
    program, *arguments = str(hook["entry"]).split()
    assert program == "precast"
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


def test_the_page_names_these_packages() -> None:
    page = (ROOT / "docs" / "check.md").read_text(encoding="utf-8")
    assert f"pip install {' '.join(NEEDED)}" in page
    for hook in HOOKS:
        assert f"id: {hook['id']}" in page
