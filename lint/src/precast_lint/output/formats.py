"""Findings as text: for people (full, concise), for programs (json), for GitHub's annotations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from precast_lint.running.report import FileReport, Reported

__all__ = ["FORMATS", "diff", "statistics", "summary"]


def full(findings: Sequence[Reported]) -> str:
    """Return one line for each finding, and the line of the file with marks under the place."""
    return "\n".join(part for finding in findings for part in _full(finding))


def _full(finding: Reported) -> Iterator[str]:
    margin = " " * len(str(finding.row))
    end = finding.end_column if finding.end_row == finding.row else len(finding.line) + 1
    marks = "^" * max(1, end - finding.column)
    before = "".join("\t" if ch == "\t" else " " for ch in finding.line[: finding.column - 1])
    yield _concise(finding)
    yield f"{margin} |"
    yield f"{finding.row} | {finding.line}"
    yield f"{margin} | {before}{marks}"
    if finding.fix is not None:
        unsafe = " (unsafe)" if finding.fix["applicability"] == "unsafe" else ""
        yield f"{margin} = fix{unsafe}: {finding.fix['message']}"
    yield ""


def concise(findings: Sequence[Reported]) -> str:
    """Return one line for each finding."""
    return "\n".join(map(_concise, findings))


def _concise(finding: Reported) -> str:
    cell = f"cell {finding.cell}:" if finding.cell is not None else ""
    place = f"{finding.filename}:{cell}{finding.row}:{finding.column}"
    fixable = (
        "" if finding.fix is None else " [*]" if finding.fix["applicability"] == "safe" else " [-]"
    )
    return f"{place}: {finding.code}{fixable} {finding.message}"


def as_json(findings: Sequence[Reported]) -> str:
    """Return a list of objects, with ruff's keys."""
    import json

    return json.dumps([_object(finding) for finding in findings], indent=2)


def _object(finding: Reported) -> dict[str, Any]:
    return {
        "cell": finding.cell,
        "code": finding.code,
        "name": finding.name,
        "message": finding.message,
        "severity": finding.severity,
        "filename": finding.filename,
        "location": {"row": finding.row, "column": finding.column},
        "end_location": {"row": finding.end_row, "column": finding.end_column},
        "fix": finding.fix,
        "noqa_row": finding.noqa_row,
        "url": None,  # the pages have no address: `precast-lint check --explain CODE` prints them
    }


def github(findings: Sequence[Reported]) -> str:
    """Return workflow commands, which GitHub shows beside the lines."""
    return "\n".join(map(_annotation, findings))


def _annotation(finding: Reported) -> str:
    kind = {"error": "error", "warning": "warning", "information": "notice"}[finding.severity]
    place = f"line={finding.row},col={finding.column},endLine={finding.end_row},endColumn={finding.end_column}"
    title = f"precast-lint ({finding.code})"
    return f"::{kind} title={title},file={_escaped(finding.filename)},{place}::{_escaped(_concise(finding), data=True)}"


def _escaped(text: str, data: bool = False) -> str:
    text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text if data else text.replace(":", "%3A").replace(",", "%2C")


FORMATS: dict[str, Callable[[Sequence[Reported]], str]] = {
    "full": full,
    "concise": concise,
    "json": as_json,
    "github": github,
}


def summary(reports: Sequence[FileReport]) -> str:
    """Return the counts of findings and fixes, and of fixes that were not applied."""
    rest = [finding for report in reports for finding in report.findings]
    fixed = sum(len(report.fixed) for report in reports)
    failed = sum(report.failed for report in reports)
    if not rest and not fixed and not failed:
        return "All checks passed."
    lines = []
    if failed:
        files = "1 file" if failed == 1 else f"{failed} files"
        lines.append(f"{files} could not be checked: a defect of precast-lint.")
    if fixed:
        lines.append(f"Found {_counted(len(rest) + fixed)} ({fixed} fixed, {len(rest)} left).")
    else:
        lines.append(f"Found {_counted(len(rest))}.")
    safe = sum(f.fix is not None and f.fix["applicability"] == "safe" for f in rest)
    unsafe = sum(f.fix is not None and f.fix["applicability"] == "unsafe" for f in rest)
    if safe:
        lines.append(f"[*] {safe} fixable with `precast-lint check --fix`.")
    if unsafe:
        lines.append(
            f"[-] {unsafe} more with `--unsafe-fixes`, which may change what the program does."
        )
    return "\n".join(lines)


def _counted(count: int) -> str:
    return f"{count} finding" if count == 1 else f"{count} findings"


def statistics(reports: Sequence[FileReport]) -> str:
    """Return the number of findings by rule, the most frequent first."""
    results = [finding for report in reports for finding in report.findings]
    counts = Counter((f.code, f.name) for f in results)
    rows = sorted(counts.items(), key=lambda row: (-row[1], row[0]))
    return "\n".join(f"{count:>6}  {code}  {name}" for (code, name), count in rows)


def diff(report: FileReport) -> str:
    """Return a file's changes as a unified diff; a line without an end is marked."""
    import difflib

    before, after = (_lines(data or b"") for data in (report.before, report.after))
    lines = difflib.unified_diff(before, after, report.filename, report.filename)
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )


def _lines(data: bytes) -> list[str]:
    return [line.decode("utf-8", "replace") for line in data.splitlines(keepends=True)]
