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

from precast.cli.try_command import _name_unseen_writers
from precast.running.trial.experiment import Experiment
from precast.running.trial.plan import TrialPlan
from precast.running.trial.process import Launcher
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
        tmp_path,
        *("--json", "--steps", "3", "--dtype", "bfloat16", "--seconds", "900"),
        *("train.py", "--lr", "1"),
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


def test_a_script_that_fails_is_shown_with_its_error(tmp_path: Path) -> None:
    program = PROGRAM + "    if _ == 11:\n        raise OSError('gone')\n"
    process = start(tmp_path, "train.py", program=program)
    stdout, stderr = process.communicate(timeout=600)
    assert process.returncode == 1
    assert "after 12 steps: OSError: gone." in " ".join(stdout.split())
    assert "raise OSError('gone')" in stderr
    assert "running" not in stderr
    assert sorted(os.listdir(tmp_path)) == ["tmp", "train.py"]


def test_wrong_usage_runs_nothing(tmp_path: Path) -> None:
    for arguments, message in [
        (["missing.py"], "no script 'missing.py'"),
        (["--step", "train", "train.py"], "expected MODULE:NAME"),
        (["--policy", "bf16", "train.py"], "that is a dtype"),
    ]:
        process = start(tmp_path, *arguments)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 2
        assert message in " ".join(stderr.split())


def test_libraries_that_write_by_other_means_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text("from package.data import read\n")
    (tmp_path / "package" / "data.py").write_text("import h5py\nfrom sqlite3 import connect\n")
    (tmp_path / "train.py").write_text("import torch, package.data\nimport package.data\n")
    for program, is_module in [("package", True), ("train.py", False)]:
        _name_unseen_writers(program, is_module)
        assert "imports h5py, sqlite3: files that these write" in capsys.readouterr().err


def test_a_program_that_catches_everything_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("precast.running.trial.process._GRACE", 0.5)
    monkeypatch.setattr("precast.running.trial.experiment._ROUNDS", 1)
    monkeypatch.setattr("precast.running.trial.experiment._MOST_ROUNDS", 1)
    monkeypatch.setattr(Experiment, "_find_reasons", lambda _: None)
    program = tmp_path / "train.py"
    program.write_text(
        PROGRAM.replace(
            "    optimizer.step()", "    try:\n        optimizer.step()\n    except:\n        pass"
        )
    )
    launcher = Launcher(tmp_path / "trials")
    launcher.folder.mkdir()
    plan = TrialPlan(str(program), steps=3, warm_up=1, seconds=300)
    result = Experiment(plan, launcher, "bfloat16", 0)
    result.run()
    assert [each.ended for each in result.base.outcomes] == ["steps"]
    assert result.comparisons()[0].speedup is not None


DDP = """
import torch
from torch import nn
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(50):
    optimizer.zero_grad()
    loss = (model(torch.ones(4, 8) * rank) - 1).square().mean()
    loss.backward()
    optimizer.step()
    if rank == 0:
        torch.save(model.state_dict(), "model.pt")
    torch.distributed.barrier()
    assert torch.load("model.pt")["module.weight"].equal(model.module.weight)
    torch.distributed.barrier()
"""


def test_processes_of_torchrun_are_one_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("precast.running.trial.experiment._ROUNDS", 1)
    monkeypatch.setattr("precast.running.trial.experiment._MOST_ROUNDS", 1)
    for folder in ("work", "trials"):
        (tmp_path / folder).mkdir()
    program = tmp_path / "work" / "train.py"
    program.write_text(DDP)
    launcher = Launcher(tmp_path / "trials", 2)
    plan = TrialPlan(str(program), steps=3, warm_up=1, seconds=300)
    monkeypatch.chdir(program.parent)
    result = Experiment(plan, launcher, "bfloat16", 0)
    result.run()
    [comparison] = result.comparisons()
    assert [len(each.seconds) for each in result.base.outcomes] == [4]
    assert comparison.is_equal
    assert comparison.setting.edit.path == str(program)
    assert result.withheld == [str(program.with_name("model.pt"))]
    assert os.listdir(program.parent) == ["train.py"]
