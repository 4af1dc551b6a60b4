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
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from precast._internal.records import from_json
from precast.running.trial.plan import TrialOutcome, TrialPlan

__all__ = ["Launcher", "ending_with_the_command"]

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
    """Runs trials, one after the other.

    Attributes:
        folder: a temporary folder for all trials.
        processes: the number of processes of a trial; with more than one, torchrun starts them.
        stdin: the bytes that each trial reads from stdin.
        progress: called with the setting and the number of steps that have ended.
    """

    folder: Path
    processes: int
    stdin: bytes
    progress: Callable[[TrialPlan, int], None]

    def run(self, plan: TrialPlan, limit: float) -> TrialOutcome:
        """Run a trial. The output of the first one is passed on to stderr.

        Args:
            plan: its plan, whose folder exists.
            limit: the seconds after which its processes are killed.
        """
        path = plan.save()
        launcher = [] if self.processes == 1 else self._torchrun()
        module = ["-m", "precast.running.trial.process", str(path)]
        command = [sys.executable, *_flags_of_python(), *launcher, *module]
        log = Path(plan.folder, "output.txt")
        with tempfile.TemporaryFile() as stdin, open(log, "wb") as file:
            stdin.write(self.stdin)
            stdin.seek(0)
            output: Any = sys.stderr if plan.is_first and sys.stderr is sys.__stderr__ else file
            process = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=output,
                stderr=subprocess.STDOUT if output is file else output,
                env={**os.environ, **self._environment(plan)},
                start_new_session=True,
            )
            try:
                outcome = self._wait(process, plan, limit)
            finally:
                _kill(process)
        outcome.output = "" if output is not file else _tail(log)
        return outcome

    def _torchrun(self) -> list[str]:
        return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.processes}"]

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
        finished = [each for each in outcomes if each.ended in {"steps", "time"}]
        failed = [each for each in outcomes if each.ended == "error"]
        if outcomes:  # when rank 0 has finished, the others may fail, as they wait for it
            return (finished or failed or outcomes)[0]
        if code:
            return TrialOutcome("error", f"exit code {code}")
        return TrialOutcome("killed")


def _flags_of_python() -> list[str]:
    """Return the options of this Python for warnings and optimisation."""
    warnings = [f"-W{option}" for option in sys.warnoptions]
    return ["-O"] * sys.flags.optimize + warnings


def _tail(log: Path) -> str:
    with contextlib.suppress(OSError):
        return log.read_text(errors="replace")[-_TAIL:]
    return ""


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and the group of processes that it started."""
    if process.poll() is None:
        process.terminate()  # torchrun ends the processes of the ranks
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def ending_with_the_command() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into an exception, so that trials are killed before this process ends."""

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    numbers = [signal.SIGTERM, signal.SIGHUP]
    previous = [signal.signal(number, end) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)
