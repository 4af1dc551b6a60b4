"""Start of the process of a trial, and its end: by itself, after a limit, or with the command.

Invariants: a trial never outlives the command; the process group of a trial is killed when its outcome is there; what
the program prints in the first trial goes to stderr, in the others to a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from precast._internal.records import as_json, from_json
from precast.running.trial.plan import TrialOutcome, TrialPlan

__all__ = ["Launcher"]

_POLL: Final = 0.05  # seconds
_GRACE: Final = 5.0
"""Seconds in which a process may end by itself after its last step; then it is killed."""
_STARTUP: Final = 120.0
"""Seconds in which the first step must begin, on top of the plan's."""
_TAIL: Final = 3000  # characters of the output of a program that failed
_SWITCHES: Final = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
"""Environment variables that switch off what libraries send over the network, and what Python writes itself."""


@dataclass
class Launcher:
    """Runs trials, one after the other."""

    folder: Path
    """A temporary folder for all trials."""
    processes: int = 1
    """The processes of a trial. If there are several, torchrun starts them."""
    progress: Callable[[TrialPlan, int], None] = lambda _plan, _steps: None
    """Called with the plan and the number of steps that have ended."""

    def run(self, plan: TrialPlan, limit: float) -> TrialOutcome:
        """Run a trial; after `limit` seconds it is killed. The output of one that fails in float32 goes to stderr."""
        path = Path(plan.folder, "plan.json")
        path.write_text(json.dumps(as_json(plan)))
        command = [sys.executable]
        if self.processes > 1:
            command += ["-m", "torch.distributed.run", "--standalone"]
            command += [f"--nproc-per-node={self.processes}"]
        command += ["-m", "precast.running.trial.process", str(path)]
        log = Path(plan.folder, "output.txt")
        with open(log, "w+", errors="replace") as file:
            output: Any = sys.stderr if plan.is_first and sys.stderr is sys.__stderr__ else file
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **self._environment(plan)},
                start_new_session=True,
            )
            try:
                outcome = self._wait(process, plan, limit)
            finally:
                _kill(process)
            if outcome.ended == "error" and plan.dtype is None and not plan.sources:
                print(log.read_text(errors="replace")[-_TAIL:], end="", file=sys.stderr)
        return outcome

    def _environment(self, plan: TrialPlan) -> dict[str, str]:
        temporary, cache = Path(plan.folder, "tmp"), self.folder / "compiled"
        for each in (temporary, cache, Path(plan.folder, "files")):
            each.mkdir(exist_ok=True)
        base = {"PYTHONHASHSEED": str(plan.seed)}
        if plan.allows_writes:
            return base
        folders = {"TMPDIR": str(temporary), "MLFLOW_TRACKING_URI": (temporary / "mlruns").as_uri()}
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
        return {**base, **_SWITCHES, **folders, **caches}

    def _wait(
        self, process: subprocess.Popen[bytes], plan: TrialPlan, limit: float
    ) -> TrialOutcome:
        outcomes: list[TrialOutcome] = []
        began, end = time.monotonic(), time.monotonic() + limit + _STARTUP
        with open(plan.events, "a+b") as events:
            events.seek(0)
            waiting = b""
            while True:
                code = process.poll()
                waiting += events.read()
                *lines, waiting = waiting.split(b"\n")
                for event in map(json.loads, lines):
                    if "outcome" in event:
                        outcomes.append(from_json(TrialOutcome, event["outcome"]))
                        end = min(end, time.monotonic() + _GRACE)
                    else:
                        self.progress(plan, event["steps"])
                        end = min(end, max(began + limit, time.monotonic() + 1) + _GRACE)
                if code is not None or time.monotonic() > end:
                    break
                time.sleep(_POLL)
        # When rank 0 has finished, the others may fail, as they wait for it.
        order = ("steps", "time", "error", "itself", "killed")
        error = TrialOutcome("error", f"exit code {code}") if code else TrialOutcome("killed")
        return min(outcomes, key=lambda each: order.index(each.ended), default=error)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and the group of processes that it started."""
    if process.poll() is None:
        process.terminate()  # torchrun ends the processes of the ranks
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
