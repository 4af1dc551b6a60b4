"""LibCST, loaded when a file is first parsed; a fast walk over its nodes; parents and dotted names.

Invariants: importing this module does not import LibCST (a quarter of a second); the walk leaves
whitespace, punctuation and operators out, and visits every other node once.
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

    class _Lazy:
        """A proxy of the package `libcst` that imports it when one of its names is first used."""

        def __getattr__(self, name: str) -> Any:
            value = getattr(import_module("libcst"), name)
            setattr(self, name, value)
            return value

    cst = _Lazy()
    Node = object

__all__ = [
    "Node",
    "children",
    "cst",
    "dotted",
    "enclosing_class",
    "is_self",
    "methods_named",
    "strings",
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


class _Kinds(dict[type, bool]):
    """Return True for node classes; faster than `issubclass`, because nodes are abstract classes."""

    def __missing__(self, kind: type) -> bool:
        self[kind] = issubclass(kind, cst.CSTNode)
        return self[kind]


_is_node = _Kinds()


def children(node: Node) -> Iterator[Node]:
    """The nodes directly inside one, whitespace and punctuation left out."""
    for name in _child_fields(type(node)):
        value = getattr(node, name)
        if _is_node[type(value)]:
            yield value
        elif isinstance(value, (tuple, list)):
            for item in value:
                if _is_node[type(item)]:
                    yield item


def walk(node: Node) -> Iterator[Node]:
    """A node and all nodes inside it."""
    stack = [node]
    while stack:
        inner = stack.pop()
        yield inner
        stack.extend(reversed(list(children(inner))))


def enclosing_class(node: Node, parents: dict[Node, Node]) -> cst.ClassDef | None:
    """Return the innermost class that a node is in."""
    inner: Node | None = node
    while inner is not None and not isinstance(inner, cst.ClassDef):
        inner = parents.get(inner)
    return inner


def methods_named(home: cst.ClassDef, name: str) -> list[cst.FunctionDef]:
    """Return the methods of one name that the body of a class defines."""
    functions = (line for line in home.body.body if isinstance(line, cst.FunctionDef))
    return [function for function in functions if function.name.value == name]


def is_self(node: Node | None) -> bool:
    """Return True for the name self or cls."""
    return isinstance(node, cst.Name) and node.value in ("self", "cls")


def dotted(node: Node | None) -> str | None:
    """`a.b.c` as text; None for anything but names and attributes of names."""
    parts: list[str] = []
    while isinstance(node, cst.Attribute):
        parts.append(node.attr.value)
        node = node.value
    if not isinstance(node, cst.Name):
        return None
    return ".".join([node.value, *reversed(parts)])


def strings(node: Node) -> str | None:
    """The value of a string literal; None for f-strings, bytes and anything else."""
    if isinstance(node, (cst.SimpleString, cst.ConcatenatedString)):
        value = node.evaluated_value
        return value if isinstance(value, str) else None
    return None
