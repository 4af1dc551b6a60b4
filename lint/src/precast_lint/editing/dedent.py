"""Moves the last statements of a `with` block behind it, by taking indentation off their lines."""

from __future__ import annotations

from collections.abc import Sequence

from precast_lint.model import Edit
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, walk

__all__ = ["move_out"]


def move_out(source: Source, block: Node, node: Node) -> tuple[Edit, ...] | None:
    """Edits that end a `with` block before the statement that holds a node.

    None where that can't be done line by line: the statement is the block's first one, or deeper inside;
    the block has other `with` items, which would end too; or a text spans several lines.
    """
    if not isinstance(block, cst.With) or len(block.items) != 1 or block.asynchronous is not None:
        return None
    if not isinstance(block.body, cst.IndentedBlock):
        return None
    statements = list(block.body.body)
    at = next((i for i, s in enumerate(statements) if s is source.statement(node)), 0)
    tail = statements[at:]
    if at == 0 or any(_spans_lines(source, inner) for s in tail for inner in walk(s)):
        return None
    return _dedented(source, _margin(source, block), statements[at - 1], tail)


def _dedented(
    source: Source, outside: str | None, before: Node, tail: Sequence[Node]
) -> tuple[Edit, ...] | None:
    text = source.text
    inside = _margin(source, tail[0])
    if outside is None or inside is None or not inside.startswith(outside):
        return None
    first = text.position(source.span(before).end - 1)[0] + 1
    last = text.position(source.span(tail[-1]).end - 1)[0]
    row = text.position(source.span(tail[0]).start)[0]
    while row > first and text.line(row - 1).strip().startswith("#"):
        row -= 1
    edits = []
    for number in range(row, last + 1):
        if text.line(number).startswith(inside):
            start = text.starts[number - 1]
            edits.append(Edit(start + len(outside), start + len(inside), ""))
    return tuple(edits)


def _margin(source: Source, statement: Node) -> str | None:
    """The whitespace before a statement; None if something else stands there."""
    start = source.span(statement).start
    before = source.text.data[source.text.line_start(start) : start].decode("utf-8")
    return None if before.strip() else before


def _spans_lines(source: Source, node: Node) -> bool:
    is_text = isinstance(node, (cst.SimpleString, cst.FormattedString))
    return is_text and "\n" in source.code(node)
