"""Edits of whole statements: one put before another or after it, one taken away, two exchanged.

Invariants: only statements that have their lines for themselves are touched; all else gives None.
"""

from __future__ import annotations

from precast_lint.editing.imports import is_alone
from precast_lint.model import Edit
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst

__all__ = ["block_of", "insert_before", "line_of", "remove"]


def line_of(source: Source, node: Node) -> cst.SimpleStatementLine | None:
    """The line whose one statement is this expression or statement, and nothing else."""
    line = source.statement(node)
    if not isinstance(line, cst.SimpleStatementLine) or not is_alone(source, line.body[0]):
        return None
    return line


def block_of(source: Source, line: Node) -> list[Node]:
    """The statements among which one stands, itself included."""
    parent = source.parents.get(line)
    body = getattr(parent, "body", ())
    return list(body) if isinstance(body, (list, tuple)) else []


def insert_before(source: Source, line: Node, code: str) -> Edit:
    """Puts a statement on a line of its own before another."""
    start, indent = _start(source, line)
    return Edit(start, start, f"{indent}{code}{source.text.newline}")


def remove(source: Source, line: Node) -> Edit | None:
    """Takes a statement's lines away; None if a comment stands on them, or nothing would be left."""
    start, _ = _start(source, line)
    stop = source.text.data.find(b"\n", source.span(line).end)
    end = len(source.text.data) if stop < 0 else stop + 1
    if source.text.data[source.span(line).end : end].strip() or len(block_of(source, line)) < 2:
        return None
    return Edit(start, end, "")


def _start(source: Source, line: Node) -> tuple[int, str]:
    at = source.span(line).start
    start = source.text.line_start(at)
    return start, source.text.data[start:at].decode("utf-8")
