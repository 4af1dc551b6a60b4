"""The process of one trial: its start by the command and its end, and ``python -m precast.running.trial.process PLAN``.

Invariants: a trial never outlives the command; its process group is killed when its outcome is there. The program has
the `__main__`, arguments and modules that it has under Python; what it prints in the first trial goes to stderr. Only
the process of rank 0 writes the outcome, and any process the error that ends it. A replaced file is not changed, and no
bytecode of it used. Nothing here imports torch before the program does.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import functools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from precast._internal.records import as_json, from_json
from precast.running.exit_status import ExitStatus, ExitWatcher, error_text, exit_now
from precast.running.import_hook import when_torch_is_loaded
from precast.running.module_isolation import ModuleIsolation
from precast.running.output_files import rank_from_environment
from precast.running.target import Target
from precast.running.trial.plan import TrialEnd, TrialEnding, TrialOutcome, TrialPlan
from precast.running.trial.withheld_files import WithheldFiles

if TYPE_CHECKING:
    from precast.running.trial.step_meter import StepMeter

__all__ = ["Launcher", "TrialProcess"]

_POLL: Final = 0.05  # seconds
_GRACE: Final = 5.0  # seconds in which a process may end by itself after its last step
_STARTUP: Final = 120.0  # seconds in which the first step must begin, on top of the plan's
_SWITCHES: Final = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
"""Environment variables that switch off what libraries send over the network, and what Python writes itself."""

_SET_DEATH_SIGNAL = 1  # of Linux's prctl
_SPAWNED = {"multiprocessing.popen_forkserver", "multiprocessing.popen_spawn_posix"}
"""The modules that `multiprocessing` imports when it first starts a process, other than by a fork."""


@dataclass
class Launcher:
    """Runs trials, one after the other."""

    folder: Path  # a temporary one
    processes: int = 1  # of a trial; torchrun starts several
    progress: Callable[[TrialPlan, int], None] = lambda _plan, _steps: None
    """Called with the plan and the number of steps that have ended."""

    def run(self, plan: TrialPlan, limit: float) -> TrialOutcome:
        """Run a trial; after `limit` seconds it is killed."""
        environment, path = self.environment(plan), Path(plan.folder, "plan.json")
        path.write_text(json.dumps(as_json(plan)))
        several = f"-m torch.distributed.run --standalone --nproc-per-node={self.processes}".split()
        launcher = several if self.processes > 1 else []
        output = sys.__stderr__ if plan.is_first else subprocess.DEVNULL
        process = subprocess.Popen(
            [sys.executable, *launcher, "-m", "precast.running.trial.process", str(path)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        try:
            return self._wait(process, plan, limit)
        finally:
            if process.poll() is None:
                process.terminate()  # torchrun ends the processes of the ranks
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(1.0)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def environment(self, plan: TrialPlan) -> dict[str, str]:
        """Return the variables to change for a trial; makes its folders."""
        temporary, cache = Path(plan.folder, "tmp"), self.folder / "compiled"
        for each in (temporary, cache, Path(plan.folder, "files")):
            each.mkdir(parents=True, exist_ok=True)
        variables = {"PYTHONHASHSEED": str(plan.seed)}
        if not plan.allows_writes:
            variables |= _SWITCHES
            variables |= {"MLFLOW_TRACKING_URI": (temporary / "mlruns").as_uri()}
            variables |= {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(cache)}
            variables |= {"TRITON_CACHE_DIR": str(cache / "triton")}
        return variables

    def _wait(
        self, process: subprocess.Popen[bytes], plan: TrialPlan, limit: float
    ) -> TrialOutcome:
        outcomes: list[TrialOutcome] = []
        code, part, began = None, b"", time.monotonic()
        end = began + limit + _STARTUP
        with open(plan.events, "a+b") as events:
            events.seek(0)
            while code is None and time.monotonic() < end:
                time.sleep(_POLL)
                code = process.poll()
                *lines, part = (part + events.read()).split(b"\n")
                for event in map(json.loads, lines):
                    if "outcome" in event:
                        outcomes.append(from_json(TrialOutcome, event["outcome"]))
                        end = min(end, time.monotonic() + _GRACE)
                    else:
                        self.progress(plan, event["steps"])
                        end = min(end, max(began + limit, time.monotonic() + 1) + _GRACE)
        # When rank 0 has finished, the others may fail, as they wait for it.
        order = ("steps", "time", "error", "itself", "killed")
        error = TrialOutcome("error", f"exit code {code}") if code else TrialOutcome("killed")
        return min(outcomes, key=lambda each: order.index(each.ended), default=error)


class TrialProcess:
    """Runs the program of a plan until its last step."""

    def __init__(self, plan: TrialPlan) -> None:
        self._plan = plan
        self._rank = rank_from_environment().number or 0
        self._events = os.open(plan.events, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._isolation = ModuleIsolation()
        folder = Path(plan.folder)
        self._files = WithheldFiles(folder / "files", folder.parent)
        self._meter: StepMeter | None = None
        self._is_written = False
        self._process = os.getpid()
        self._error: str | None = None

    def run(self) -> None:
        """Run the program."""
        random.seed(self._plan.seed)
        builtins.__precast_step__ = self._count_calls  # type: ignore[attr-defined]
        if self._plan.sources or self._plan.step_function:
            _replace_sources(self._plan)
        if not self._plan.allows_writes:
            self._files.start()
        when_torch_is_loaded(self._measure)
        self._watcher = ExitWatcher(self._finish)
        self._watcher.run(self._run_program)

    def _run_program(self) -> None:
        plan = self._plan
        try:
            Target(plan.program, plan.is_module, tuple(plan.arguments)).run(self._isolation.begin)
        except TrialEnd:
            sys.stdout.flush()
            exit_now(0)  # nothing of the program runs after its last step
        except BaseException as error:
            self._error = self._files.shown(error_text(error))
            raise

    def _measure(self) -> None:
        """Start to measure when PyTorch is loaded."""
        with self._isolation.ours():
            from precast import _torch
            from precast.running.trial.step_meter import StepMeter

            self._meter = StepMeter(self._plan, lambda n: self._send(steps=n), self._write_end)
            if not self._plan.allows_writes:
                _torch.redirect_files(self._files.redirected)

    def _count_calls(self, function: Any) -> Any:
        """Return a function whose calls are steps."""

        @functools.wraps(function)
        def counting(*args: Any, **kwargs: Any) -> Any:
            call = functools.partial(function, *args, **kwargs)
            return call() if self._meter is None else self._meter.count_call(call)

        return counting

    def _write_end(self) -> None:
        self._finish(ExitStatus())
        if os.getpid() != self._process:  # a process that the program started by a fork
            exit_now(0)

    def _finish(self, status: ExitStatus) -> None:
        failed = status.how == "exception" or (status.how == "exit" and status.code)
        if self._is_written or (self._rank and not failed):
            return
        self._is_written = True
        interrupted = status.how == "interrupted"
        ended: TrialEnding = "error" if failed else "killed" if interrupted else "itself"
        with self._isolation.ours():
            outcome = self._meter.outcome(ended) if self._meter else TrialOutcome(ended)
        if failed:
            outcome.error = self._error or status.message or f"exit code {status.code}"
        outcome.starts_processes = not _SPAWNED.isdisjoint(sys.modules)
        outcome.withheld = list(self._files.paths)
        self._send(outcome=as_json(outcome))

    def _send(self, **event: Any) -> None:
        """Write an event as one line. A line is written in one piece, so that ranks do not mix theirs."""
        if self._rank == 0 or "outcome" in event:
            os.write(self._events, json.dumps(event).encode() + b"\n")


def _replace_sources(plan: TrialPlan) -> None:
    """Run the plan's texts in place of files, and decorate its step function by `TrialProcess._count_calls`."""
    module, _, name = (plan.step_function or ":").partition(":")
    definition = re.compile(rf"^([ \t]*)(async )?def {re.escape(name.rpartition('.')[2])}\(", re.M)
    is_main = module in {"__main__", Path(plan.program).stem}
    names = {module, "__main__"} if is_main else {module}
    read, stats = SourceFileLoader.get_data, SourceFileLoader.path_stats

    def get_data(loader: Any, path: Any) -> bytes:
        data = plan.sources[path].encode() if path in plan.sources else read(loader, path)
        if name and loader.name in names and str(path).endswith(".py"):
            text = definition.sub(r"\1@__precast_step__\n\g<0>", data.decode(), count=1)
            data = text.encode()
        return data

    def path_stats(loader: Any, path: Any) -> Any:
        if path in plan.sources or loader.name in names:
            raise OSError("this text has no file")
        return stats(loader, path)

    SourceFileLoader.get_data = get_data  # type: ignore[assignment, method-assign]
    SourceFileLoader.path_stats = path_stats  # type: ignore[assignment, method-assign]


def main() -> None:
    """Run the trial whose plan is the first argument, until the command ends (on Linux)."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    TrialProcess(from_json(TrialPlan, json.loads(Path(sys.argv[1]).read_text()))).run()


if __name__ == "__main__":
    main()
