"""`python -m tools.versions`: which versions it takes, what it makes of pytest's report, when it fails."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tools import versions
from tools.versions import Run, merged, oldest_and_newest, read_report

REPORT = """<?xml version="1.0"?><testsuites><testsuite>
<testcase classname="tests.a" name="right"/>
<testcase classname="tests.a" name="printed"><system-out>x</system-out></testcase>
<testcase classname="tests.a" name="gpu"><skipped message="none here"/></testcase>
<testcase classname="tests.a" name="wrong[1]"><failure>E</failure></testcase>
<testcase classname="tests.a" name="left_open"><error>E</error></testcase>
<testcase classname="tests.a" name="wrong[1]"><error>again, in teardown</error></testcase>
</testsuite></testsuites>"""


def run(torch: str, **changes: Any) -> Run:
    row = {"python": "3.11.7", "passed": 3, "skipped": 1, "failed": 0, "failures": ()}
    return Run(torch, **{**row, "seconds": 9, "date": "2026-01-02", **changes})


def test_the_ends_of_the_supported_range_that_pip_finds() -> None:
    result = ["2.99.0", "2.15.0", "2.9.1", "2.11.1", "2.11.0", "1.13.1", "2.13.0+cpu"]
    assert oldest_and_newest(result) == ["2.11.0", "2.15.0"]
    assert oldest_and_newest(["2.9.1", "2.13.0+cpu"]) == ["2.13.0+cpu"]
    with pytest.raises(SystemExit, match="no PyTorch that precast supports"):
        oldest_and_newest(["2.9.1"])


def test_what_pip_says_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    message = "torch (2.15.0)\nAvailable versions: 2.15.0, 2.14.1\n  INSTALLED: 2.13.0+cpu\n"
    done = SimpleNamespace(stdout=message, stderr="")
    monkeypatch.setattr(versions.subprocess, "run", lambda *_, **__: done)
    assert versions.found_by_pip("python") == ["2.15.0", "2.14.1"]
    done.stdout, done.stderr = "", "ERROR: no network"
    with pytest.raises(SystemExit, match="no network"):
        versions.found_by_pip("python")


def test_every_test_of_a_report_counts_once(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    passed, skipped, failures = read_report(tmp_path / "report.xml")
    assert (passed, skipped) == (2, 1)
    assert failures == ("tests.a::wrong[1]", "tests.a::left_open")


def test_a_run_replaces_the_row_of_its_versions_alone() -> None:
    before = [{"torch": "2.9.0", "python": "3.11.7"}, {"torch": "2.10.0", "python": "3.12.1"}]
    rows = merged(before, [run("2.15.0"), run("2.9.0"), run("2.10.0")])
    assert [(row["torch"], row["python"]) for row in rows] == [
        ("2.9.0", "3.11.7"),
        ("2.10.0", "3.11.7"),
        ("2.10.0", "3.12.1"),
        ("2.15.0", "3.11.7"),
    ]
    assert rows[0]["passed"] == 3


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """`main` with runs that end as given, and its file elsewhere."""
    monkeypatch.setattr(versions, "RESULTS", tmp_path / "data" / "versions.json")

    def call(*arguments: str, ends: dict[str, Run]) -> int:
        monkeypatch.setattr(versions, "_run", lambda version, *_: ends[version])
        return versions.main(arguments)

    return call


@pytest.mark.parametrize(
    ("second", "code"),
    [
        (run("2.15.0"), 0),
        (run("2.15.0", failed=1, failures=("t",)), 1),
        (run("2.15.0", passed=0), 1),
    ],
)
def test_any_failure_fails_and_all_is_told(
    command: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, second: Run, code: int
) -> None:
    ends = {"2.10.0": run("2.10.0"), "2.15.0": second}
    assert command("2.10.0", "2.15.0", "--json", ends=ends) == code
    reports = capsys.readouterr()
    assert [row["torch"] for row in json.loads(reports.out)["runs"]] == ["2.10.0", "2.15.0"]
    assert "torch 2.10.0 (1 of 2): 3 passed, 1 skipped, 0 failed" in reports.err
    contents = json.loads((tmp_path / "data" / "versions.json").read_text())["runs"]
    assert [row["torch"] for row in contents] == ["2.10.0", "2.15.0"][: 1 + bool(second.passed)]


def test_a_run_of_some_tests_is_not_written_down(command: Any, tmp_path: Path) -> None:
    assert (
        command("2.10.0", "--pytest", "tests/test_a.py", "-x", ends={"2.10.0": run("2.10.0")}) == 0
    )
    assert not (tmp_path / "data").exists()


def test_what_cannot_be_installed_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(versions, "ROOT", tmp_path)
    monkeypatch.setattr(versions, "ENVIRONMENTS", tmp_path / ".venvs")
    monkeypatch.setattr(versions, "RESULTS", tmp_path / "versions.json")
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text("")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$2" = venv ] && exit 3\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    assert versions.main(["2.10.0", "--python", str(python), "--json"]) == 1
    [row] = json.loads(capfd.readouterr().out)["runs"]
    assert row["failed"] == 1
    assert "cannot be installed" in row["failures"][0]
