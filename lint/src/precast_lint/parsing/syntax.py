"""Access to the syntax trees of LibCST: a lazy import, a fast walk, and the text of names and strings.

Invariants: importing this module does not import LibCST, which takes a quarter of a second. A walk visits each node
once, except for whitespace, punctuation and operators.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import libcst as cst
    from libcst import CSTNode as Node
else:

    class _LazyLibCST:
        """A proxy of the package `libcst`, which is imported when one of its names is first used."""

        def __getattr__(self, name: str) -> Any:
            value = getattr(import_module("libcst"), name)
            setattr(self, name, value)
            return value

    cst = _LazyLibCST()
    Node = object

__all__ = [
    "Node",
    "children",
    "cst",
    "dotted",
    "enclosing_class",
    "is_self",
    "methods_named",
    "string_value",
    "walk",
]

_TRIVIA = re.compile(
    r"whitespace|lpar|rpar|lbracket|rbracket|lbrace|rbrace|header|footer|"
    r"leading_lines|lines_after|trailing_whitespace|semicolon|comma|equal|dot|"
    r"operator|colon|asynchronous|newline|indent|first_colon|second_colon|separator"
)


@functools.cache
def _child_fields(kind: type) -> tuple[str, ...]:
    return tuple(f.name for f in fields(kind) if not _TRIVIA.match(f.name))


class _NodeClasses(dict[type, bool]):
    """A table that maps a class to True if it is a node class. `issubclass` is slow: node classes are abstract."""

    def __missing__(self, kind: type) -> bool:
        self[kind] = issubclass(kind, cst.CSTNode)
        return self[kind]


_is_node = _NodeClasses()


def children(node: Node) -> Iterator[Node]:
    """Yield the child nodes of a node, without whitespace, punctuation and operators."""
    for name in _child_fields(type(node)):
        value = getattr(node, name)
        if _is_node[type(value)]:
            yield value
        elif isinstance(value, (tuple, list)):
            for item in value:
                if _is_node[type(item)]:
                    yield item


def walk(node: Node) -> Iterator[Node]:
    """Yield a node and all nodes inside it."""
    stack = [node]
    while stack:
        inner = stack.pop()
        yield inner
        stack.extend(reversed(list(children(inner))))


def enclosing_class(node: Node, parents: dict[Node, Node]) -> cst.ClassDef | None:
    """Return the innermost class definition around a node."""
    inner: Node | None = node
    while inner is not None and not isinstance(inner, cst.ClassDef):
        inner = parents.get(inner)
    return inner


def methods_named(class_def: cst.ClassDef, name: str) -> list[cst.FunctionDef]:
    """Return the methods with this name in the body of a class."""
    functions = (line for line in class_def.body.body if isinstance(line, cst.FunctionDef))
    return [function for function in functions if function.name.value == name]


def is_self(node: Node | None) -> bool:
    """Return True for the names `self` and `cls`."""
    return isinstance(node, cst.Name) and node.value in ("self", "cls")


def dotted(node: Node | None) -> str | None:
    """Return the text `a.b.c` of a name or of attributes of a name; None for other expressions."""
    parts: list[str] = []
    while isinstance(node, cst.Attribute):
        parts.append(node.attr.value)
        node = node.value
    if not isinstance(node, cst.Name):
        return None
    return ".".join([node.value, *reversed(parts)])


def string_value(node: Node) -> str | None:
    """Return the value of a string literal; None for f-strings, bytes and other expressions."""
    if isinstance(node, (cst.SimpleString, cst.ConcatenatedString)):
        value = node.evaluated_value
        return value if isinstance(value, str) else None
    return None
