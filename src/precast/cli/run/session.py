"""Runs a program under precast, and leaves a report whatever happens.

Invariants: nothing that is done here changes how the program ends; what precast has to say comes on stderr, after all
that the program says.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from precast.cli.run.document import document_of
from precast.cli.run.exit_status import ExitStatus, ExitWatcher
from precast.cli.run.import_hook import when_torch_is_loaded
from precast.cli.run.module_isolation import ModuleIsolation
from precast.cli.run.output_files import OutputFiles
from precast.cli.run.target import Target
from precast.cli.run.terminal_summary import said, summary
from precast.errors import OutputError, PrecastError

if TYPE_CHECKING:
    from precast.cli.run.run_observer import RunObserver
    from precast.diagnostics.schema import Document

__all__ = ["Request", "run"]


@dataclass(frozen=True)
class Request:
    """What `precast run` was asked for.

    Attributes:
        target: the program.
        places: where the report goes.
        policy: the name of a preset, or the path of a policy file.
        traced: the first step that is traced in full, and the first that no longer is.
        health: whether numbers are looked at, too.
        opens: whether the page is shown in a browser at the end.
    """

    target: Target
    places: OutputFiles
    policy: str = "torch"
    traced: tuple[int, int] = (2, 5)
    health: bool = False
    opens: bool = False


def run(request: Request) -> None:
    """Runs the program; returns where it ended by itself. Target and places have been checked.

    Raises:
        SystemExit, Interrupted: as `ExitWatcher.run`.
    """
    _Session(request).run()


class _Session:
    def __init__(self, request: Request) -> None:
        self._request = request
        self._watch: RunObserver | None = None
        self._refused = False
        self._apart = ModuleIsolation()
        self._listen: Callable[[], None] = lambda: None
        self._began = time.perf_counter()
        # Now, as the program may change the folder: paths in messages are as they were asked for.
        self._here = Path.cwd()

    def run(self) -> None:
        when_torch_is_loaded(self._look_on)
        target, endings = self._request.target, ExitWatcher(self._finish)
        self._listen = endings.listener.listen
        endings.run(lambda: target.run(self._apart.begin))

    def _look_on(self) -> None:
        """PyTorch is there; a program that cannot run as asked ends here."""
        with self._apart.ours():
            self._watch_program()

    def _watch_program(self) -> None:
        try:
            from precast.cli.run.run_observer import RunObserver

            request = self._request
            watch = RunObserver(request.policy, request.traced, request.health, self._listen)
            watch.start()
        except PrecastError as error:
            self._refused = True
            _say(f"Error: {error}\n")
            sys.exit(2)
        self._watch = watch

    def _finish(self, ending: ExitStatus) -> None:
        if self._refused:
            return
        try:
            with self._apart.ours():
                document = self._document(ending)
                where = _write(document, self._request.places, self._here)
                _say(summary(document, where))
                if self._request.opens and ending.how != "interrupted":
                    _open(self._request.places)
        except BaseException as error:  # nothing that fails here is the program's failure
            _say(said(f"there is no report: {type(error).__name__}: {error}"))

    def _document(self, ending: ExitStatus) -> Document:
        seconds = time.perf_counter() - self._began
        if self._watch is not None:
            self._watch.stop()
        request = self._request
        rank, watch = request.places.rank, self._watch
        return document_of(
            request.target, rank, request.policy, ending=ending, seconds=seconds, watch=watch
        )


def _write(document: Document, places: OutputFiles, here: Path) -> list[str]:
    """Writes what was asked for, or the same elsewhere; says where it is."""
    try:
        return _write_to(document, places, here)
    except OutputError as error:
        problem = str(error)
    try:
        return [problem, *_write_to(document, places.elsewhere(), here)]
    except OSError as error:
        return [problem, f"no other place was found for it either: {error}"]


def _write_to(document: Document, places: OutputFiles, here: Path) -> list[str]:
    from precast.diagnostics import report

    written = []
    if places.own_json is not None:
        report.save(document, places.own_json)
        written.append(places.own_json)
    if places.own_report is not None:
        report.write(document, places.own_report)
        written.append(places.own_report)
    if places.rank.of > 1:
        written += _merge(places)
    return ["written: " + ", ".join(_shown(path, here) for path in written)]


def _merge(places: OutputFiles) -> list[Path]:
    """Merges what is there of all ranks: the last to end has all. One that ends meanwhile is seen, and merged too."""
    from precast.diagnostics import report

    merged: list[Path] = []
    while (found := places.documents_of_ranks()) != merged:
        merged = found
        document = report.merge([report.load(path) for path in found])
        if places.json is not None:
            report.save(document, places.json)
        if places.report is not None:
            report.write(document, places.report)
    return [path for path in (places.json, places.report) if path is not None]


def _open(places: OutputFiles) -> None:
    """Shows the page; of several processes one does."""
    page = places.report
    if page is None or places.rank.number not in {None, 0}:
        return
    import webbrowser

    if not (page.exists() and webbrowser.open(page.as_uri())):
        _say(said(f"no browser was found to open {page}"))


def _shown(path: Path, here: Path) -> str:
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _say(text: str) -> None:
    """On the process's own stderr; a program that closed it hears nothing, and ends as it would."""
    try:
        if sys.__stderr__ is not None:
            sys.__stderr__.write(text)
            sys.__stderr__.flush()
    except (OSError, ValueError):
        return
