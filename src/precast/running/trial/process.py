"""The process of one trial: ``python -m precast.running.trial.process PLAN``.

Invariants: the program has the `__main__`, arguments and modules that it has under Python; only the process of rank 0
writes the outcome, and any process the error that ends it; a replaced file is not changed, and no bytecode of it used.
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
import sys
from importlib.machinery import SourceFileLoader
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

_SET_DEATH_SIGNAL = 1  # of Linux's prctl


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
        self._processes = 0
        self._error: str | None = None

    def run(self) -> None:
        """Run the program."""
        random.seed(self._plan.seed)
        self._count_processes()
        builtins.__precast_step__ = self._count_calls  # type: ignore[attr-defined]
        if self._plan.sources or self._plan.step_function:
            _replace_sources(self._plan)
        if not self._plan.allows_writes:
            self._files.start()
        when_torch_is_loaded(self._measure)
        self._watcher = ExitWatcher(self._finish)
        self._watcher.run(self._run_program)

    def _count_processes(self) -> None:
        """Count the processes that the program starts by `multiprocessing`, apart from data loaders' workers."""
        plain = BaseProcess.start

        @functools.wraps(plain)
        def start(process: BaseProcess) -> None:
            target = getattr(process, "_target", None)
            is_loader = str(getattr(target, "__module__", "")).startswith("torch.utils.data")
            self._processes += not is_loader
            plain(process)

        BaseProcess.start = start  # type: ignore[assignment, method-assign]

    def _run_program(self) -> None:
        plan = self._plan
        try:
            target = Target(plan.program, plan.is_module, tuple(plan.arguments))
            target.run(self._isolation.begin)
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
            self._meter.start()
            if not self._plan.allows_writes:
                _torch.redirect_files(self._files.place)

    def _count_calls(self, function: Any) -> Any:
        """Return a function whose calls are steps."""

        @functools.wraps(function)
        def counting(*args: Any, **kwargs: Any) -> Any:
            if self._meter is None:
                return function(*args, **kwargs)
            return self._meter.count_call(lambda: function(*args, **kwargs))

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
        ended: TrialEnding = "killed" if status.how == "interrupted" else "itself"
        ended = "error" if failed else ended
        with self._isolation.ours():
            outcome = TrialOutcome(ended) if self._meter is None else self._meter.outcome(ended)
        if failed:
            outcome.error = self._error or status.message or f"exit code {status.code}"
        outcome.started_processes = self._processes
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
    read, stats = SourceFileLoader.get_data, SourceFileLoader.path_stats

    def has_step(loader: Any) -> bool:
        is_main = loader.name == "__main__" and module in {"__main__", Path(plan.program).stem}
        return bool(module) and (is_main or loader.name == module)

    def get_data(loader: Any, path: Any) -> bytes:
        if path in plan.sources:
            return plan.sources[path].encode()
        data = read(loader, path)
        if not (has_step(loader) and str(path).endswith(".py")):
            return data
        return definition.sub(r"\1@__precast_step__\n\g<0>", data.decode(), count=1).encode()

    def path_stats(loader: Any, path: Any) -> Any:
        if path in plan.sources or has_step(loader):
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
