"""The report on a file: findings with rows and columns, in a form that can be printed and pickled.

Invariants: rows and columns are counted from 1, columns in characters. An end column is the first one after the
finding. In a notebook, rows are counted from the start of the cell.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from precast_lint.model import Edit, LintFinding
    from precast_lint.parsing.text import Text

__all__ = ["FileReport", "Reported", "reported"]


@dataclass(frozen=True)
class Reported:
    """A finding with rows and columns."""

    code: str
    name: str
    message: str
    severity: str
    filename: str
    row: int
    column: int
    end_row: int
    end_column: int
    line: str
    fix: dict[str, Any] | None = None
    noqa_row: int = 0
    cell: int | None = None


@dataclass
class FileReport:
    """The result of a run for one file.

    Attributes:
        filename: the file.
        findings: the remaining findings.
        fixed: the code of each fixed finding.
        before: the bytes of the file, if they changed.
        after: the new bytes.
        note: the reason why the file was skipped.
        failed: True if the reason is a defect of precast-lint.
    """

    filename: str
    findings: list[Reported] = field(default_factory=list)
    fixed: list[str] = field(default_factory=list)
    before: bytes | None = None
    after: bytes | None = None
    note: str | None = None
    failed: bool = False


def reported(
    finding: LintFinding,
    text: Text,
    filename: str,
    to_cell: Callable[[int], tuple[int, int]] | None = None,
) -> Reported:
    """Return a finding with rows and columns. `to_cell` converts a row of a notebook's code to a cell and a row."""
    row, column = text.position(finding.span.start)
    end_row, end_column = text.position(finding.span.end)
    cell = None
    line = text.line(row)
    fix = _fix(finding, text, to_cell)
    if to_cell is not None:
        first = row
        cell, row = to_cell(row)
        end_row = row + end_row - first
    return Reported(
        code=finding.code,
        name=finding.name,
        message=finding.message,
        severity=finding.severity.value,
        filename=filename,
        row=row,
        column=column,
        end_row=end_row,
        end_column=end_column,
        line=line,
        fix=fix,
        noqa_row=row,
        cell=cell,
    )


def _fix(
    finding: LintFinding, text: Text, to_cell: Callable[[int], tuple[int, int]] | None
) -> dict[str, Any] | None:
    fix = finding.fix
    if fix is None:
        return None
    edits = [_edit(edit, text, to_cell) for edit in fix.edits]
    return {"applicability": fix.applicability.value, "message": fix.message, "edits": edits}


def _edit(
    edit: Edit, text: Text, to_cell: Callable[[int], tuple[int, int]] | None
) -> dict[str, Any]:
    """Return an edit. In a notebook it has a cell, which may differ from that of the finding."""
    row, column = text.position(edit.start)
    end_row, end_column = text.position(edit.end)
    cell: dict[str, int] = {}
    if to_cell is not None:
        number, inside = to_cell(row)
        cell, row, end_row = {"cell": number}, inside, inside + end_row - row
    return {
        "content": edit.text,
        "location": {"row": row, "column": column},
        "end_location": {"row": end_row, "column": end_column},
        **cell,
    }
