"""The oldest PyTorch that a project is for, wherever it says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precast_lint.selecting.pins import oldest_torch
from precast_lint.selecting.settings import load

FILES = {
    "a release": ("requirements.txt", "torch==1.6.0\n", "1.6.0"),
    "a build": ("requirements.txt", "numpy\ntorch==1.7.1+cu101  # for CUDA 10\n", "1.7.1"),
    "with spaces": ("requirements-gpu.txt", "torch >= 1.10, < 2\n", "1.10"),
    "a folder of lists": ("requirements/base.txt", "torch~=2.0.1\n", "2.0.1"),
    "setup.py": (
        "setup.py",
        "from setuptools import setup\nsetup(install_requires=['numpy', 'torch>=2.1,<2.3'])\n",
        "2.1",
    ),
    "setup.py that appends": (
        "setup.py",
        "requires = []\nrequires.append('torch>=1.8')\nsetup(install_requires=requires)\n",
        "1.8",
    ),
    "setup.cfg": ("setup.cfg", "[options]\ninstall_requires =\n    torch>=1.11\n", "1.11"),
    "conda": ("environment.yml", "dependencies:\n  - pytorch=1.12\n  - python=3.9\n", "1.12"),
    "a recipe": ("meta.yaml", "requirements:\n  run:\n    - pytorch >=1.13\n", "1.13"),
    "the standard's table": ("pyproject.toml", '[project]\ndependencies = ["torch>=2.2"]\n', "2.2"),
    "an extra": (
        "pyproject.toml",
        "[project.optional-dependencies]\ngpu = [\"torch>=2.0; python_version > '3.8'\"]\n",
        "2.0",
    ),
    "a group": ("pyproject.toml", '[dependency-groups]\ndev = ["torch==2.4.*"]\n', "2.4"),
    "Poetry": ("pyproject.toml", '[tool.poetry.dependencies]\ntorch = "^1.13"\n', "1.13"),
    "Poetry's table": (
        "pyproject.toml",
        '[tool.poetry.group.ml.dependencies]\ntorch = {version = "2.1.2", source = "x"}\n',
        "2.1.2",
    ),
    "Poetry's choices": (
        "pyproject.toml",
        '[tool.poetry.dependencies]\ntorch = [{version = "^2.0", platform = "linux"}, {version = "1.13"}]\n',
        "1.13",
    ),
    "uv's constraints": (
        "pyproject.toml",
        '[tool.uv]\nconstraint-dependencies = ["torch<2.4"]\n',
        "2.3",
    ),
    "a wheel's address": (
        "requirements.txt",
        "torch @ https://download.pytorch.org/whl/cu113/torch-1.10.0%2Bcu113-cp38-cp38-linux_x86_64.whl\n",
        "1.10.0",
    ),
    "what is compiled to a list": ("requirements.in", "torch>=1.9\n", "1.9"),
    "a recipe in a folder": (
        "conda.recipe/meta.yaml",
        "requirements:\n  run:\n    - pytorch >=1.12,<2.0\n",
        "1.12",
    ),
    "a channel": ("environment.yaml", "dependencies:\n  - pytorch::pytorch=1.12.1\n", "1.12.1"),
    "only a bound above": ("requirements.txt", "torch<2.3\n", "2.2"),
    "a bound that bounds nothing": ("requirements.txt", "torch<3\n", None),
    "no version": ("requirements.txt", "torch\ntorchvision==0.7\n", None),
    "another package": ("requirements.txt", "pytorch-lightning==1.6\ntorchaudio>=0.9\n", None),
    "a comment": ("requirements.txt", "# torch==1.6 was used\ntorch\n", None),
    "not TOML": ("pyproject.toml", "[[[", None),
    "not Python": ("setup.py", "setup(install_requires=['torch>=2.1'", None),
}


@pytest.mark.parametrize(("name", "text", "oldest"), FILES.values(), ids=FILES)
def test_a_projects_file_says_the_oldest_pytorch(
    tmp_path: Path, name: str, text: str, oldest: str | None
) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text("")
    assert oldest_torch(tmp_path / "package" / "train.py") == oldest
    assert oldest_torch(tmp_path) == oldest


def test_of_several_pins_the_oldest_counts(tmp_path: Path) -> None:
    (tmp_path / "setup.py").write_text("setup(install_requires=['torch>=1.10'])")
    (tmp_path / "requirements.txt").write_text("torch==2.4.0\n")
    assert oldest_torch(tmp_path) == "1.10"


def test_a_fix_keeps_to_the_versions_of_a_setup_py(tmp_path: Path) -> None:
    (tmp_path / "setup.py").write_text("setup(install_requires=['torch>=2.1,<2.3'])")
    assert load(tmp_path, {}).min_torch == "2.1"
    assert load(tmp_path, {"min_torch": "2.4"}).min_torch == "2.4"


@given(st.text(max_size=80))
def test_any_text_is_read(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.mktemp("project")
    for name in ("pyproject.toml", "setup.py", "setup.cfg", "requirements.txt"):
        (folder / name).write_text(f"torch>={text}", encoding="utf-8")
    result = oldest_torch(folder)
    assert result is None or result[0].isdigit()
