"""`precast run` shows what precast-lint finds in the program's files, and is not disturbed by a checker that fails."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from precast.report.schema import Finding
from precast.running import source_check
from precast.running.source_check import SourceCheck
from tests.running.test_run import assert_alike, both, write

CLIP = """
import helper, torch
from torch import nn

def never_called(net, optimizer, batches):
    own_scaler = torch.amp.GradScaler("cuda")
    for x in batches:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = net(x).square().mean()
        own_scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        own_scaler.step(optimizer)
        own_scaler.update()

torch.manual_seed(0)
net = nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for _ in range(2):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = net(torch.randn(4, 8)).square().mean()
    scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
print([p.sum().item().hex() for p in net.parameters()])
"""


def test_findings_of_precast_lint_are_in_the_report_of_a_run(tmp_path: Path) -> None:
    write(tmp_path, CLIP)
    write(tmp_path, "import torch\nregion = torch.cuda.amp.autocast\n", "helper.py")
    write(tmp_path, CLIP, "not_imported.py")
    plain, run = both(tmp_path, "program.py")
    assert_alike(plain, run)
    findings = run.document["findings"]
    # The run saw the clipping of line 25 itself, so AMP203 does not name it once more.
    assert [(each["severity"], each["kind"], each["where"]["source"]) for each in findings] == [
        ("error", "scaled gradients clipped", "program.py:25 in <module>"),
        ("error", "AMP203", "program.py:12"),
        ("warning", "AMP006", "helper.py:2"),
    ]
    summary = run.document["summary"]
    assert summary["level"] == "warning"
    assert "`clip_grad_norm_` clipped" in summary["headline"]
    text = " ".join(" ".join(run.ours).split())
    assert "precast-lint finds an error (AMP203): " in text
    assert "precast-lint has 1 warning on the program's files" in text
    assert "error AMP203" in (tmp_path / "precast-report.html").read_text()


def findings(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    checker: str = "",
    *,
    is_hurried: bool = False,
) -> list[Finding]:
    """Check one file; `checker` is a shell script that takes the place of Python."""
    program = tmp_path / "program.py"
    program.write_text(CLIP)
    monkeypatch.setattr(source_check, "_files_of_program", lambda: [program])
    if checker:
        script = tmp_path / "checker"
        script.write_text(f"#!/bin/sh\n{checker}\n")
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.chdir(tmp_path)
    return list(SourceCheck().findings([], lambda: is_hurried))


def test_the_findings_name_place_severity_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = findings(tmp_path, monkeypatch)
    assert [(each.kind, each.severity, each.where.source) for each in found] == [
        ("AMP203", "error", "program.py:12"),
        ("AMP203", "error", "program.py:25"),
    ]
    assert found[0].title.endswith("(`program.py:12`)")
    assert "`precast check --explain AMP203`" in found[0].suggestion


@pytest.mark.parametrize("checker", ["exec sleep 60", "kill -INT $$; sleep 60"])
def test_a_checker_that_takes_too_long_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checker: str
) -> None:
    monkeypatch.setattr(source_check, "_LIMIT", 0.3)
    began = time.monotonic()
    assert findings(tmp_path, monkeypatch, checker) == []
    assert time.monotonic() - began < 30


def test_a_process_that_has_to_end_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = time.monotonic()
    assert findings(tmp_path, monkeypatch, "exec sleep 60", is_hurried=True) == []
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    "checker", ["exit 2", "echo no JSON", "echo '{}'", "echo '[1]'", "echo '[{}]'", "echo '[]'"]
)
def test_an_answer_that_cannot_be_read_gives_no_findings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checker: str
) -> None:
    assert findings(tmp_path, monkeypatch, checker) == []


def test_without_precast_lint_no_process_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_check, "_is_installed", lambda: False)
    monkeypatch.setattr(subprocess, "Popen", None)
    assert findings(tmp_path, monkeypatch) == []


def test_installed_packages_are_not_files_of_the_program(tmp_path: Path) -> None:
    write(tmp_path, "x = 1", "package/__init__.py")
    write(
        tmp_path,
        """
        import click, json, package, precast, sys
        from precast.running.source_check import _files_of_program
        print([path.name for path in _files_of_program()])
        """,
    )
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "['program.py', '__init__.py']\n"
