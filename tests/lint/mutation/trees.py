"""Edits of a program as a tree: statements and expressions are found, taken out, put elsewhere.

Invariant: no function changes the tree that it gets; each returns a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import libcst as cst

__all__ = [
    "Body",
    "assigned",
    "assignment",
    "blocks",
    "call_of",
    "calls",
    "expr",
    "indented",
    "inside",
    "is_import",
    "lines",
    "made",
    "method",
    "moved",
    "names",
    "nodes",
    "path",
    "renamed",
    "replaced",
    "source",
    "start_of_code",
    "stmt",
    "with_imports",
]

Body = Sequence[cst.CSTNode]
_New = cst.CSTNode | Sequence[cst.CSTNode] | None


def source(node: cst.CSTNode) -> str:
    """The text of a node."""
    return cst.Module([]).code_for_node(node)


def expr(text: str) -> cst.BaseExpression:
    """An expression from its text."""
    return cst.parse_expression(text)


def stmt(text: str) -> list[cst.CSTNode]:
    """Statements from their text."""
    return list(cst.parse_module(text).body)


def nodes(tree: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """A node and all below it, in the order of the text."""
    yield tree
    for child in tree.children:
        yield from nodes(child)


def path(node: cst.CSTNode | None) -> str | None:
    """`a.b.c` as text; None for anything else."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        owner = path(node.value)
        return None if owner is None else f"{owner}.{node.attr.value}"
    return None


def calls(tree: cst.CSTNode, *wanted: str) -> Iterator[cst.Call]:
    """The calls of dotted names."""
    for node in nodes(tree):
        if isinstance(node, cst.Call) and path(node.func) in wanted:
            yield node


def blocks(tree: cst.CSTNode) -> Iterator[Body]:
    """The lists of statements: of the module, and of all that is indented."""
    for node in nodes(tree):
        if isinstance(node, (cst.Module, cst.IndentedBlock)):
            yield node.body


def lines(tree: cst.CSTNode) -> Iterator[cst.SimpleStatementLine]:
    """The simple statements."""
    for node in nodes(tree):
        if isinstance(node, cst.SimpleStatementLine):
            yield node


def call_of(line: cst.CSTNode) -> cst.Call | None:
    """The call that a statement consists of."""
    if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1:
        [small] = line.body
        if isinstance(small, cst.Expr) and isinstance(small.value, cst.Call):
            return small.value
    return None


def method(line: cst.CSTNode, name: str) -> tuple[str, cst.Call] | None:
    """The receiver's text and the call, if a statement is `receiver.name(...)`."""
    call = call_of(line)
    if call is not None and isinstance(call.func, cst.Attribute) and call.func.attr.value == name:
        return source(call.func.value), call
    return None


def assigned(line: cst.CSTNode) -> tuple[str, cst.BaseExpression] | None:
    """The name and the value of `name = value`."""
    if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1:
        [small] = line.body
        if isinstance(small, cst.Assign) and len(small.targets) == 1:
            name = path(small.targets[0].target)
            return None if name is None else (name, small.value)
    return None


def made(line: cst.CSTNode) -> tuple[str, cst.Call] | None:
    """The name and the call of `name = call(...)`."""
    result = assigned(line)
    return (result[0], result[1]) if result and isinstance(result[1], cst.Call) else None


def assignment(module: cst.Module, name: str) -> cst.SimpleStatementLine | None:
    """The first statement that gives a name its value."""
    for line in lines(module):
        result = assigned(line)
        if result is not None and result[0] == name:
            return line
    return None


def indented(body: Sequence[cst.CSTNode]) -> cst.IndentedBlock:
    """A block of statements."""
    return cst.IndentedBlock(body=body)  # type: ignore[arg-type]


def is_import(line: cst.CSTNode) -> bool:
    """Return True if a statement imports."""
    return isinstance(line, cst.SimpleStatementLine) and isinstance(
        line.body[0], (cst.Import, cst.ImportFrom)
    )


def inside(outer: cst.CSTNode, node: cst.CSTNode) -> bool:
    """Return True if a node is another, or below it."""
    return any(result is node for result in nodes(outer))


def names(tree: cst.CSTNode) -> set[str]:
    """All names that are not attributes or keywords."""
    result: set[str] = set()

    class Visitor(cst.CSTVisitor):
        def visit_Attribute(self, node: cst.Attribute) -> bool:
            node.value.visit(self)
            return False

        def visit_Arg(self, node: cst.Arg) -> bool:
            node.value.visit(self)
            return False

        def visit_Name(self, node: cst.Name) -> None:
            result.add(node.value)

    tree.visit(Visitor())
    return result


class _Replace(cst.CSTTransformer):
    """Puts new nodes, several or none in the place of some."""

    def __init__(self, news: Mapping[Any, _New]) -> None:
        self.news = news

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> object:  # type: ignore[override]
        if original_node not in self.news:
            return updated_node
        new = self.news[original_node]
        if new is None:
            return cst.RemovalSentinel.REMOVE
        if isinstance(new, cst.CSTNode):
            return new
        return cst.FlattenSentinel(list(new))


def replaced(module: cst.Module, news: Mapping[Any, _New]) -> cst.Module:
    """The program with other nodes in the place of some; None takes a statement out."""
    done = module.visit(_Replace(news))
    assert isinstance(done, cst.Module)
    return done


def moved(
    module: cst.Module,
    line: cst.CSTNode,
    *,
    before: cst.CSTNode | None = None,
    after: cst.CSTNode | None = None,
) -> cst.Module:
    """The program with a statement elsewhere."""
    if before is not None:
        return replaced(module, {line: None, before: [line, before]})
    assert after is not None
    return replaced(module, {line: None, after: [after, line]})


def start_of_code(module: cst.Module) -> int:
    """The index of the first statement behind docstring and imports."""
    body = module.body
    last = [i for i, line in enumerate(body) if is_import(line)]
    return last[-1] + 1 if last else 0


def with_imports(module: cst.Module, text: str) -> cst.Module:
    """The program with more imports; those that are there stay alone."""
    known = {source(line).strip() for line in module.body if is_import(line)}
    new = [line for line in stmt(text) if source(line).strip() not in known]
    place = next((i for i, line in enumerate(module.body) if is_import(line)), 0)
    future = [i for i, line in enumerate(module.body) if "__future__" in source(line)]
    place = future[-1] + 1 if future else place
    body = [*module.body[:place], *new, *module.body[place:]]
    return module.with_changes(body=body)


def renamed(module: cst.Module, change: Callable[[str], str | None]) -> cst.Module:
    """The program with other names; attributes and keywords stay."""

    class Renamer(cst.CSTTransformer):
        def leave_Attribute(
            self, original_node: cst.Attribute, updated_node: cst.Attribute
        ) -> cst.Attribute:
            return updated_node.with_changes(attr=original_node.attr)

        def leave_Arg(self, original_node: cst.Arg, updated_node: cst.Arg) -> cst.Arg:
            return updated_node.with_changes(keyword=original_node.keyword)

        def visit_Import(self, node: cst.Import) -> bool:
            return False

        def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
            return False

        def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.BaseExpression:
            new = change(original_node.value)
            return updated_node if new is None else cst.parse_expression(new)

    done = module.visit(Renamer())
    assert isinstance(done, cst.Module)
    return done
