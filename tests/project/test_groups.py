"""The groups of tests: `make test` leaves out what `make test-project` runs and nothing else, and `make ci` runs both.

What neither runs, because it needs an environment of its own, is named in pyproject.toml and has a target of its own.
"""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def runs_of_pytest(target: str) -> list[list[str]]:
    """The arguments of each run of pytest that a target of the Makefile would start."""
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", target],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line.split() for line in done.stdout.replace("\\\n", " ").splitlines()]
    return [line[line.index("pytest") + 1 :] for line in lines if "pytest" in line]


def left_out(arguments: list[str]) -> set[str]:
    return {one.removeprefix("--ignore=") for one in arguments if one.startswith("--ignore=")}


def named(arguments: list[str]) -> set[str]:
    return {one for one in arguments if one.startswith("tests/")}


def test_what_one_group_leaves_out_the_other_runs() -> None:
    [package], [project] = runs_of_pytest("test"), runs_of_pytest("test-project")
    assert named(package) == set(), "it runs all of tests/ but what it leaves out"
    assert left_out(package) == named(project) != set()
    assert left_out(project) == set()
    assert [path for path in named(project) if not (ROOT / path).exists()] == []


def test_no_other_argument_chooses_tests() -> None:
    for arguments in (*runs_of_pytest("test"), *runs_of_pytest("test-project")):
        others = {one for one in arguments if not one.startswith(("tests/", "--ignore=tests/"))}
        assert others == {"--numprocesses", "auto", "--dist", "worksteal"}


def test_folders_that_pytest_passes_by_have_a_target_of_their_own() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    passed_by = set(settings["tool"]["pytest"]["ini_options"]["norecursedirs"])
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.name in passed_by}
    assert folders == {"clients", "package"}
    for name in folders:
        [arguments] = runs_of_pytest(f"test-{name}")
        assert f"tests/{name}" in arguments


def test_ci_runs_every_group() -> None:
    started = runs_of_pytest("ci")
    for target in ("test", "test-project", "test-clients", "test-package"):
        [arguments] = runs_of_pytest(target)
        assert arguments in started, target
