"""Runs a program under precast, and leaves a report whatever happens.

Invariants: nothing that is done here changes how the program ends; what precast has to say comes on stderr, after all
that the program says.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precast.errors import OutputError, PrecastError
from precast.running.exit_status import ExitStatus, ExitWatcher
from precast.running.import_hook import when_torch_is_loaded
from precast.running.module_isolation import ModuleIsolation
from precast.running.output_files import OutputFiles
from precast.running.source_check import SourceCheck
from precast.running.target import Target
from precast.running.terminal_summary import said, summary

if TYPE_CHECKING:
    from precast.diagnostics.schema import Document
    from precast.running.run_observer import RunObserver

__all__ = ["Session"]


@dataclass
class Session:
    """One run of a program.

    Attributes:
        target: the program, which has been checked.
        files: where the report goes, checked too.
        policy: the name of a preset, or the path of a policy file.
        traced: the first step that is traced in full, and the first that no longer is.
        health: whether the model's numbers are watched, too.
        opens: whether the page is shown in a browser at the end.
    """

    target: Target
    files: OutputFiles
    policy: str
    traced: tuple[int, int]
    health: bool
    opens: bool

    def __post_init__(self) -> None:
        self._observer: RunObserver | None = None
        self._refused = False
        self._isolation = ModuleIsolation()
        self._source_check = SourceCheck()
        self._listen: Callable[[], None] = lambda: None
        self._began = time.perf_counter()
        self._folder = (
            Path.cwd()
        )  # messages say paths from here, also when the program has changed the folder

    def run(self) -> None:
        """Runs the program; returns if it ended by itself.

        Raises:
            SystemExit, Interrupted: as `ExitWatcher.run`.
        """
        when_torch_is_loaded(self._observe)
        self._watcher = ExitWatcher(self._finish)
        self._listen = self._watcher.listener.listen
        self._watcher.run(lambda: self.target.run(self._isolation.begin))

    def _observe(self) -> None:
        """Watches from here on, as PyTorch is there now; a policy that cannot be read ends the program."""
        try:
            with self._isolation.ours():
                from precast.running.run_observer import RunObserver

                observer = RunObserver(self.policy, self.traced, self.health, self._listen)
                observer.start()
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
                self._check_source(document)
                where = _write(document, self.files, self._folder)
                slower = () if self._observer is None else _slower_engine()
                _say(summary(document, [*self._hints(status), *slower, *where]))
                if self.opens and status.how != "interrupted":
                    _open(self.files)
        except BaseException as error:  # nothing that fails here is the program's failure
            _say(said(f"there is no report: {type(error).__name__}: {error}"))

    def _check_source(self, document: Document) -> None:
        """Add the findings of precast-lint on the program's files, unless the process has to end at once."""
        if self._observer is None or self._watcher.is_dying:
            return
        document.findings += self._source_check.findings(
            document.findings, lambda: self._watcher.is_dying
        )

    def _hints(self, status: ExitStatus) -> Iterator[str]:
        option = self.target.misplaced_option(is_rejected=status.code == 2)
        if option:
            yield option
        if self._observer is not None and status.how == "exception":
            from precast.running.dtype_error import advice_on

            advice = advice_on(sys.last_value)
            if advice:
                yield advice

    def _document(self, status: ExitStatus) -> Document:
        from precast.diagnostics.report import blank

        document = blank(self.target.command, self.policy)
        run, rank = document.run, self.files.rank
        run.seconds = time.perf_counter() - self._began
        run.ended, run.code, run.message = status.how, status.code, status.message
        run.rank, run.world_size = rank.number, rank.of
        if self._observer is not None:
            self._observer.stop()
            self._observer.describe(document)
        return document


def _slower_engine() -> list[str]:
    """Return a sentence on the reference engine, if this process ran on it, and on the command that replaces it."""
    from precast.diagnostics.hardware.engine_report import engine_here

    engine = engine_here(measure=False)
    if not engine.reason:
        return []
    remedy = f". For the faster native engine: {engine.remedy}" if engine.remedy else ""
    return [f"regions ran on the slower reference engine, as {engine.reason}{remedy}"]


def _write(document: Document, files: OutputFiles, folder: Path) -> list[str]:
    """Writes what was asked for, or the same elsewhere; returns sentences that say where it is."""
    try:
        return _write_to(document, files, folder)
    except OutputError as error:
        problem = str(error)
    try:
        return [problem, *_write_to(document, files.elsewhere(), folder)]
    except OSError as error:
        return [problem, f"no other place was found for it either: {error}"]


def _write_to(document: Document, files: OutputFiles, folder: Path) -> list[str]:
    written = _save(document, files.own_json, files.own_report)
    if files.rank.of > 1:
        written += _merge(files)
    shown = (path.relative_to(folder) if path.is_relative_to(folder) else path for path in written)
    return ["written: " + ", ".join(map(str, shown))]


def _merge(files: OutputFiles) -> list[Path]:
    """Merges the documents that are there: the last rank to end finds all. Once more if one came meanwhile."""
    from precast.diagnostics import report

    merged: list[Path] = []
    written: list[Path] = []
    while (found := files.documents_of_ranks()) != merged:
        merged = found
        document = report.merge([report.load(path) for path in found])
        written = _save(document, files.json, files.report)
    return written


def _save(document: Any, json: Path | None, page: Path | None) -> list[Path]:
    """Writes the data and the page, where there is a path for them; returns what was written."""
    from precast.diagnostics import report

    if json is not None:
        report.save(document, json)
    if page is not None:
        report.write(document, page)
    return [path for path in (json, page) if path is not None]


def _open(files: OutputFiles) -> None:
    """Shows the page; of several processes one does."""
    page = files.report
    if page is None or files.rank.number not in {None, 0}:
        return
    import webbrowser

    if not (page.exists() and webbrowser.open(page.as_uri())):
        _say(said(f"no browser was found to open {page}"))


def _say(text: str) -> None:
    """Writes to the process's own stderr; where the program closed that nothing is said, and it ends as it would."""
    try:
        if sys.__stderr__ is not None:
            sys.__stderr__.write(text)
            sys.__stderr__.flush()
    except (OSError, ValueError):
        return
