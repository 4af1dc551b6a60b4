"""A run of a program under precast, which ends with a report.

Invariants: nothing here changes how the program ends; the output of precast comes on stderr, after all output of the
program.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from precast._internal.display import shown_path
from precast.errors import OutputError, PrecastError
from precast.running.exit_status import ExitStatus, ExitWatcher
from precast.running.import_hook import when_torch_is_loaded
from precast.running.module_isolation import ModuleIsolation
from precast.running.output_files import OutputFiles
from precast.running.source_check import SourceCheck
from precast.running.target import Target
from precast.running.terminal_summary import said, summary

if TYPE_CHECKING:
    from precast.report.schema import RunDocument
    from precast.running.run_observer import RunObserver

__all__ = ["RunRecording", "Session"]


class RunRecording(NamedTuple):
    """The recording of a run for `precast compare`: its file, and the arguments of `precast.record`."""

    path: Path
    options: dict[str, Any]


@dataclass
class Session:
    """One run of a program. The program and the output files are already checked."""

    target: Target
    files: OutputFiles
    policy: str
    traced: tuple[int, int]
    health: bool
    opens: bool
    recording: RunRecording | None = None

    def __post_init__(self) -> None:
        self._observer: RunObserver | None = None
        self._refused = False
        self._isolation = ModuleIsolation()
        self._source_check = SourceCheck()
        self._listen: Callable[[], None] = lambda: None
        self._began = time.perf_counter()
        self._folder = Path.cwd()  # messages have paths relative to it; the program may change it

    def run(self) -> None:
        """Run the program. Return if it ended by itself, else raise what `ExitWatcher.run` raises."""
        when_torch_is_loaded(self._observe)
        self._watcher = ExitWatcher(self._finish)
        self._listen = self._watcher.listener.listen
        self._watcher.run(lambda: self.target.run(self._isolation.begin))

    def _observe(self) -> None:
        """Start the observation when PyTorch is loaded. A policy that cannot be read ends the program."""
        try:
            with self._isolation.ours():
                from precast.running.run_observer import RunObserver

                observer = RunObserver(self.policy, self.traced, self.health, self._listen)
                observer.start()
                if self.recording is not None:
                    observer.record(*self.recording)
        except PrecastError as error:
            self._refused = True
            _say(f"Error: {error}\n")
            sys.exit(2)
        self._observer = observer

    def _finish(self, status: ExitStatus) -> None:
        if self._refused:
            return
        try:
            with self._isolation.ours():
                document = self._document(status)
                if self._observer is not None and not self._watcher.is_dying:
                    document.findings += self._source_check.findings(
                        document.findings, lambda: self._watcher.is_dying
                    )
                where = _write(document, self.files, self._folder)
                _say(summary(document, [*self._hints(status), *where, *self._commands(document)]))
                if self.opens and status.how != "interrupted":
                    _open(self.files)
        except BaseException as error:  # nothing that fails here is the program's failure
            _say(said(f"there is no report: {type(error).__name__}: {error}"))

    def _hints(self, status: ExitStatus) -> Iterator[str]:
        """Yield sentences on the error that ended the program, and on the slower engine with its remedy."""
        if self._observer is None:
            return
        from precast.diagnostics.hardware.engine_report import engine_here
        from precast.running.dtype_error import advice_on

        if status.how == "exception" and (advice := advice_on(sys.last_value)):
            yield advice
        engine = engine_here()
        if engine.reason:
            remedy = f". For the faster native engine: {engine.remedy}" if engine.remedy else ""
            yield f"regions ran on the slower reference engine, as {engine.reason}{remedy}"

    def _commands(self, document: RunDocument) -> Iterator[str]:
        """Yield commands to continue with: that compares the recording, and that measures mixed precision."""
        from precast.report.evidence import ran_lower, rules_ran

        if self._observer is not None and self._observer.recording is not None:
            path = shown_path(self._observer.recording.path, self._folder)
            yield f"recorded: {path}. To compare it with another run: precast compare {path} OTHER"
        run = document.run
        is_float32 = ran_lower(document) == "no" and not rules_ran(document)
        if run.steps and run.ended == "ended" and is_float32 and not self.target.is_stdin:
            command = shlex.join(["precast", "try", *self.target.command])
            yield f"To see what mixed precision would bring: {command}"

    def _document(self, status: ExitStatus) -> RunDocument:
        from precast.report import blank

        document = blank(self.target.command, self.policy)
        run, rank = document.run, self.files.rank
        run.seconds = time.perf_counter() - self._began
        run.ended, run.code, run.message = status.how, status.code, status.message
        run.rank, run.world_size = rank.number, rank.of
        if self._observer is not None:
            self._observer.stop()
            self._observer.describe(document)
        return document


def _write(document: RunDocument, files: OutputFiles, folder: Path) -> list[str]:
    """Write the files, or the same in a temporary folder. Return sentences with their paths."""
    try:
        return _write_to(document, files, folder)
    except OutputError as error:
        problem = str(error)
    try:
        return [problem, *_write_to(document, files.elsewhere(), folder)]
    except OSError as error:
        return [problem, f"no temporary folder could be used either: {error}"]


def _write_to(document: RunDocument, files: OutputFiles, folder: Path) -> list[str]:
    saved = _save(document, files.own_json, files.own_report)
    if files.rank.of > 1:
        saved += _merge(files)
    return ["written: " + ", ".join(str(shown_path(path, folder)) for path in saved)]


def _merge(files: OutputFiles) -> list[Path]:
    """Merge the documents of all ranks that have ended. Repeat if another rank wrote one during the merge."""
    from precast import report

    merged: list[Path] = []
    saved: list[Path] = []
    while (paths := files.documents_of_ranks()) != merged:
        merged = paths
        document = report.merge([report.load(path) for path in paths])
        saved = _save(document, files.json, files.report)
    return saved


def _save(document: Any, json: Path | None, page: Path | None) -> list[Path]:
    """Write the data and the page to the paths that are not None. Return these paths."""
    from precast import report

    if json is not None:
        report.save(document, json)
    if page is not None:
        report.write(document, page)
    return [path for path in (json, page) if path is not None]


def _open(files: OutputFiles) -> None:
    """Show the page, in one of several processes."""
    page = files.report
    import webbrowser

    if page is None or files.rank.number not in {None, 0}:
        return
    if not (page.exists() and webbrowser.open(page.as_uri())):
        _say(said(f"no browser was found to open {page}"))


def _say(text: str) -> None:
    """Write to the process's original stderr. Nothing is saved if the program has closed it."""
    try:
        if sys.__stderr__ is not None:
            sys.__stderr__.write(text)
            sys.__stderr__.flush()
    except (OSError, ValueError):
        return
