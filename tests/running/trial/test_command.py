"""The command `precast try` and its processes: output, exit codes, Ctrl-C, and programs that do not want to end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from precast.running.target import Target
from precast.running.trial.experiment import Experiment, TrialOptions
from precast.running.trial.launcher import Launcher
from tests.running.test_run import hear_interrupts

TRY = [str(Path(sys.executable).with_name("precast")), "try"]
PROGRAM = """
import torch
from torch import nn
print("the program prints")
model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(100000):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
"""


def start(folder: Path, *arguments: str, program: str = PROGRAM) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(program)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "tmp")}
    (folder / "tmp").mkdir(exist_ok=True)
    return subprocess.Popen(
        [*TRY, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_interrupts,  # noqa: PLW1509 -- one system call, no lock
    )


def test_json_is_all_that_is_printed_on_stdout(tmp_path: Path) -> None:
    process = start(
        tmp_path, "--json", "--steps", "3", "--dtype", "bfloat16", "train.py", "--lr", "1"
    )
    stdout, stderr = process.communicate(timeout=600)
    data = json.loads(stdout)
    assert process.returncode == {"use": 0, "keep": 3, "undecided": 4}[data["verdict"]]
    assert "the program prints" in stderr
    assert "precast: bfloat16, step 1 of 8" in stderr
    names = [row["name"] for row in data["settings"]]
    assert names[:2] == ["float32 (as is)", "bfloat16"]  # remedies may follow
    assert sorted(os.listdir(tmp_path)) == ["tmp", "train.py"]
    assert os.listdir(tmp_path / "tmp") == []


def test_ctrl_c_ends_the_command_and_its_trial(tmp_path: Path) -> None:
    program = PROGRAM.replace(
        'print("the program prints")',
        "import os, sys\nprint(os.getpid(), file=sys.stderr, flush=True)",
    )
    process = start(tmp_path, "--steps", "1000000", "train.py", program=program)
    assert process.stderr is not None
    trial = int(process.stderr.readline())
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode not in {0, 3, 4}
    while Path(f"/proc/{trial}").exists():  # the system may need a moment; a timeout ends the test
        time.sleep(0.1)
    assert os.listdir(tmp_path / "tmp") == []


def test_wrong_usage_runs_nothing(tmp_path: Path) -> None:
    for arguments, message in [
        (["missing.py"], "there is no script 'missing.py'"),
        (["--step", "train", "train.py"], "expected MODULE:NAME"),
        (["--policy", "bf16", "train.py"], "that is a dtype"),
    ]:
        process = start(tmp_path, *arguments)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 2
        assert message in " ".join(stderr.split())


def test_a_program_that_catches_everything_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("precast.running.trial.launcher._GRACE", 0.5)
    program = tmp_path / "train.py"
    program.write_text(
        PROGRAM.replace(
            "    optimizer.step()", "    try:\n        optimizer.step()\n    except:\n        pass"
        )
    )
    launcher = Launcher(tmp_path / "trials", 1, b"", lambda _plan, _steps: None)
    launcher.folder.mkdir()
    options = TrialOptions(steps=3, warm_up=1, seconds=300, dtype="bfloat16")
    result = Experiment(Target(str(program), False), options, launcher).run()
    assert [each.ended for each in result.base.outcomes] == ["steps", "steps"]
    assert result.comparisons()[0].speedup is not None
