"""`precast check`: the command of precast-lint where it is installed, else how to get it."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
from click.testing import CliRunner

from precast.cli.main import main
from precast_lint.cli import main as lint

OLD = "import torch\n\nwith torch.cuda.amp.autocast():\n    pass\n"


def test_they_do_what_precast_lint_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text(OLD)
    for arguments in (["a.py"], ["b.py"], ["--explain", "AMP203"]):
        ours = CliRunner().invoke(main, ["check", *arguments])
        theirs = CliRunner().invoke(lint, ["check", *arguments], prog_name="main")
        assert (ours.exit_code, ours.output) == (theirs.exit_code, theirs.output)
    assert CliRunner().invoke(main, ["check", "--fix", "a.py"]).exit_code == 0
    assert 'torch.amp.autocast("cuda")' in (tmp_path / "a.py").read_text()


def test_help_lists_them_where_they_are() -> None:
    shown = CliRunner().invoke(main, ["--help"]).output
    assert [line.split()[0] for line in shown.partition("Commands:\n")[2].splitlines()] == [
        *("build", "check", "compare", "demo", "doctor", "explain", "export", "run", "try", "tune")
    ]


@pytest.fixture
def without_precast_lint(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = importlib.metadata.EntryPoints()
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: nothing)


@pytest.mark.usefixtures("without_precast_lint")
def test_where_it_is_not_installed_the_error_says_how_to_get_it() -> None:
    done = CliRunner().invoke(main, ["check", "--diff", "src"])
    assert done.exit_code == 1
    assert "`precast check` is a command of precast-lint" in done.output
    assert "pip install . ./lint" in done.output


@pytest.mark.usefixtures("without_precast_lint")
def test_all_else_works_without_them() -> None:
    assert CliRunner().invoke(main, ["--help"]).exit_code == 0
    assert "check" not in CliRunner().invoke(main, ["--help"]).output
    unknown = CliRunner().invoke(main, ["chekc"])
    assert unknown.exit_code == 2
    assert "no command 'chekc'" in unknown.output


def test_a_command_of_another_version_is_one_error_and_spoils_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    point = importlib.metadata.EntryPoint("check", "precast_lint.cli:gone", "precast.commands")
    points = importlib.metadata.EntryPoints([point])
    monkeypatch.setattr(importlib.metadata, "entry_points", points.select)
    assert CliRunner().invoke(main, ["--help"]).exit_code == 0
    done = CliRunner().invoke(main, ["check", "--diff", "src"])
    assert done.exit_code == 1
    assert "pip install . ./lint" in done.output
