"""Trials of `precast try` in processes that are forked from one that has loaded PyTorch, so that each takes 0.1 s.

Run as a program it is that process: it reads plans from stdin, forks for each, and prints the exit code.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

from precast._internal.records import as_json, from_json
from precast.running.trial.answer import TryAnswer, answer_of
from precast.running.trial.experiment import Experiment
from precast.running.trial.plan import TrialOutcome, TrialPlan
from precast.running.trial.process import Launcher


class ForkedTrials(Launcher):
    """A launcher whose trials are forked from one process."""

    def __init__(self, folder: Path, server: subprocess.Popen[str]) -> None:
        super().__init__(folder)
        self.server = server
        self.plans: list[TrialPlan] = []

    def run(self, plan: TrialPlan, limit: float) -> TrialOutcome:
        self.plans.append(plan)
        self.environment(plan)  # makes the folders
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.write(f"{json.dumps(as_json(plan))}\n")
        self.server.stdin.flush()
        code = int(self.server.stdout.readline())
        events = [json.loads(line) for line in plan.events.read_text().splitlines()]
        outcomes = [from_json(TrialOutcome, e["outcome"]) for e in events if "outcome" in e]
        return outcomes[0] if outcomes else TrialOutcome("error", f"exit code {code}")


@contextmanager
def trial_server() -> Iterator[subprocess.Popen[str]]:
    """Run the process that forks."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", __name__]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as server:
        yield server
        assert server.stdin is not None
        server.stdin.close()


def try_program(
    folder: Path, server: subprocess.Popen[str], text: str, **options: Any
) -> tuple[TryAnswer, Experiment, ForkedTrials]:
    """Run the trials of a program, and return the answer."""
    work, trials = folder / "work", folder / "trials"
    for each in (work, trials):
        each.mkdir(exist_ok=True)
    program = work / "program.py"
    program.write_text(textwrap.dedent(text))
    launcher = ForkedTrials(trials, server)
    explains = options.pop("explains", False)
    ways = {"dtype": "bfloat16", "seeds": 2}
    ways |= {name: options.pop(name) for name in ways if name in options}
    options = {"steps": 6, "warm_up": 3, "seconds": 900.0, **options}
    plan = TrialPlan(str(program), **options)
    experiment = Experiment(plan, launcher, **ways)
    with patch("precast.running.trial.experiment._MOST_ROUNDS", 2):
        with nullcontext() if explains else patch.object(experiment, "_find_reasons"):
            experiment.run()
    return answer_of(experiment), experiment, launcher


def _serve() -> None:
    import torch
    from torch import nn

    import precast.running.trial.step_meter  # noqa: F401
    from precast.policy.policy import Policy

    # What each trial would import or read.
    importlib.import_module("sklearn.datasets")
    torch.optim.SGD(nn.Linear(1, 1, device="meta").parameters())
    Policy.load("torch")
    from precast.running.trial.process import TrialProcess

    for line in sys.stdin:
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        os.dup2(2, 1)  # what the program prints
        plan = from_json(TrialPlan, json.loads(line))
        import tempfile

        tempfile.tempdir = str(Path(plan.folder, "tmp"))
        os.chdir(Path(plan.program).parent)
        TrialProcess(plan).run()
        return


if __name__ == "__main__":
    _serve()
