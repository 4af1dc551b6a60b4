"""A run over many files: in several processes, and with writing of fixes.

Invariants:
    - This process reads each file and searches for the words of the rules; only files with such words are
      parsed, in other processes if there are several files.
    - A file is replaced in one step, through links, with its mode; a crash leaves it old or new.
    - An error in one file becomes a note on it; the other files are still checked.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precast_lint.errors import CheckError
from precast_lint.running.files import read
from precast_lint.running.report import FileReport, Reported, reported
from precast_lint.selecting.look import interesting
from precast_lint.selecting.registry import ENGINE
from precast_lint.selecting.settings import LintSettings

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor

    from precast_lint.checking.engine import Checked
    from precast_lint.parsing.notebook import Broken, Notebook

__all__ = ["RunMode", "run", "run_text"]

_FEW = 8  # files below which starting processes costs more than it saves


@dataclass(frozen=True)
class RunMode:
    """Options of a run: apply fixes, and write the files.

    `fix` without `write` computes the fixes and writes nothing.
    """

    fix: bool = False
    write: bool = False


def run(
    paths: Iterable[Path],
    settings: LintSettings,
    mode: RunMode,
    *,
    advance: Callable[[int, int], object] = max,
    jobs: int | None = None,
) -> list[FileReport]:
    """Check or fix files. Returns a report for each file with a finding, a fix or a note, in the order of the paths.

    `advance` is called with the number of finished files and their total. Without `jobs` each core gets a process.
    """
    reports: dict[Path, FileReport] = {}
    work: list[tuple[str, bytes, LintSettings, RunMode]] = []
    for path in paths:
        looked = _look(path, settings)
        if isinstance(looked, bytes):
            work.append((str(path), looked, settings, mode))
            reports[path] = FileReport(str(path))  # keeps the order
        elif looked is not None:
            reports[path] = looked
    for done, (task, report) in enumerate(zip(work, _all(work, jobs), strict=True), 1):
        reports[Path(task[0])] = report
        advance(done, len(work))
    return list(reports.values())


def _look(path: Path, settings: LintSettings) -> FileReport | bytes | None:
    """Return a file's bytes if it has to be parsed; a report if it cannot be read."""
    try:
        data = read(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return FileReport(str(path), note=reason)
    return data if interesting(data, settings.codes_for(str(path))) else None


def _all(
    work: list[tuple[str, bytes, LintSettings, RunMode]], jobs: int | None
) -> Iterator[FileReport]:
    jobs = min(jobs or os.cpu_count() or 1, len(work))
    if jobs < 2 or len(work) < _FEW:
        yield from map(_one, work)
        return
    from concurrent.futures.process import BrokenProcessPool

    import libcst  # noqa: F401  # once, before this process forks

    done = 0
    try:
        with _pool(jobs) as pool:
            size = max(1, min(16, len(work) // (4 * jobs)))
            for done, report in enumerate(pool.map(_one, work, chunksize=size), 1):  # noqa: B007
                yield report
    except BrokenProcessPool:  # a file killed a process: check the remaining files one by one
        yield from map(_alone, work[done:])


def _pool(jobs: int) -> ProcessPoolExecutor:
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    kind = "fork" if "fork" in multiprocessing.get_all_start_methods() else None
    return ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context(kind))


def _alone(task: tuple[str, bytes, LintSettings, RunMode]) -> FileReport:
    """Check one file in a separate process, which the file may kill."""
    from concurrent.futures.process import BrokenProcessPool

    try:
        with _pool(1) as pool:
            return pool.submit(_one, task).result()
    except BrokenProcessPool:
        return FileReport(task[0], note="the process that checked it died", failed=True)


def _one(task: tuple[str, bytes, LintSettings, RunMode]) -> FileReport:
    filename, data, settings, mode = task
    report = run_text(filename, data, settings, mode)
    if mode.write and report.after is not None:
        from precast_lint.running import whole_file

        try:
            path = Path(filename).resolve()
            mode_bits = stat.S_IMODE(path.stat().st_mode)
            if not mode_bits & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH):
                rest = run_text(filename, data, settings, RunMode())
                return replace(rest, note="it is read-only and was not changed")
            whole_file.write(path, report.after, mode_bits)
        except OSError as error:
            return FileReport(filename, note=f"it can't be written: {error.strerror}")
    return report


def run_text(filename: str, data: bytes, settings: LintSettings, mode: RunMode) -> FileReport:
    """Check or fix the bytes of one file without writing. An unexpected error becomes a note on the file."""
    try:
        return _run_text(filename, data, settings, mode)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # what fails inside LibCST's parser is no `Exception`
        answer = (
            str(error) if isinstance(error, CheckError) else f"precast-lint failed on it: {error!r}"
        )
        return FileReport(filename, note=answer, failed=True)


def _run_text(filename: str, data: bytes, settings: LintSettings, mode: RunMode) -> FileReport:
    from precast_lint.checking import engine
    from precast_lint.parsing.notebook import Notebook, is_notebook
    from precast_lint.parsing.text import Text, decode

    try:
        notebook = Notebook(data) if is_notebook(filename) else None
        text = Text(notebook.code.encode("utf-8")) if notebook else decode(data)
    except (ValueError, RecursionError) as error:
        return FileReport(filename, note=f"it can't be read: {error}")
    do = engine.fix if mode.fix else engine.check
    checked = do(text, filename, settings)
    return _report(filename, data, notebook, checked, settings.codes_for(filename))


def _report(
    filename: str, data: bytes, notebook: Notebook | None, checked: Checked, codes: frozenset[str]
) -> FileReport:
    after = checked.text.encode()
    place: Any = None
    if notebook is not None:
        after = notebook.with_code(checked.text.string)
        place = type(notebook)(after).place
    findings = [reported(finding, checked.text, filename, place) for finding in checked.findings]
    is_reported = "AMP900" in codes and notebook is not None and notebook.broken
    if is_reported and notebook and interesting(notebook.sources.encode(), codes):
        findings.insert(0, _broken(filename, notebook.broken))
    changed = after != data and bool(checked.fixed)
    return FileReport(
        filename,
        findings,
        list(checked.fixed),
        before=data if changed else None,
        after=after if changed else None,
    )


def _broken(filename: str, cells: list[Broken]) -> Reported:
    """Return one finding for all cells of a notebook that are not Python, at the first one."""
    first = cells[0]
    more = f" (and {len(cells) - 1} more)" if len(cells) > 1 else ""
    return Reported(
        code="AMP900",
        name=ENGINE["AMP900"],
        message=f"this cell{more} is not Python that can be read: {first.reason}",
        severity="error",
        filename=filename,
        row=first.row,
        column=1,
        end_row=first.row,
        end_column=1,
        line=first.line,
        noqa_row=first.row,
        cell=first.cell,
    )
