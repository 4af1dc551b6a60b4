"""The values that a function returns, by its `return` statements."""

from __future__ import annotations

from precast_lint.parsing.syntax import Node, children, cst

__all__ = ["returned_by"]


def returned_by(function: cst.FunctionDef) -> list[Node]:
    """The values of a function's `return` statements, if it always ends with one that has a value."""
    if function.asynchronous is not None or not _returns(function.body):
        return []
    results: list[Node] = []
    stack: list[Node] = [function.body]
    while stack:
        node = stack.pop()
        if isinstance(node, cst.Yield) or (isinstance(node, cst.Return) and node.value is None):
            return []
        if isinstance(node, cst.Return) and node.value is not None:
            results.append(node.value)
        if not isinstance(node, (cst.FunctionDef, cst.Lambda, cst.ClassDef)):
            stack.extend(children(node))
    return results


def _returns(block: Node | None) -> bool:
    last = (
        block.body[-1]
        if isinstance(block, (cst.IndentedBlock, cst.SimpleStatementSuite))
        else block
    )
    if isinstance(last, cst.SimpleStatementLine):
        last = last.body[-1]
    if isinstance(last, cst.If):
        return _returns(last.body) and _returns(last.orelse)
    if isinstance(last, (cst.With, cst.Else)):
        return _returns(last.body)
    return isinstance(last, (cst.Return, cst.Raise))
