"""The lists of keys on the page about a report's data, from the classes that read and write a document.

The meaning of a key is the docstring below its field.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import json
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from precast._internal import events
from precast._internal.records import keys_of
from precast.report import schema

__all__ = ["sections"]

_WORDS = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    NoneType: "null",
    Any: "any",
}


def sections() -> str:
    """Return a section for each type; the types of its keys follow it."""
    kinds: list[Any] = []
    _collect(schema.RunDocument, kinds)
    _collect(schema.MergedDocument, kinds)
    return "\n".join(_section(kind) for kind in kinds)


def _collect(kind: Any, kinds: list[Any]) -> None:
    if dataclasses.is_dataclass(kind):
        if kind in kinds:
            return
        kinds.append(kind)
        document: Any = kind
        for key in keys_of(document):
            _collect(key.type, kinds)
    for inner in get_args(kind) if get_origin(kind) is not Literal else ():
        _collect(inner, kinds)


def _section(kind: Any) -> str:
    summary = [line.strip() for line in kind.__doc__.strip().splitlines()]
    lines = [f"### {kind.__name__}", "", *summary, ""]
    for key in keys_of(kind):
        null = " or null" if key.is_left_out else ""
        optional = ", optional" if key.may_be_missing else ""
        meaning = _meanings()[kind.__name__][key.field].removeprefix("The ")
        word = _word(key.type).removesuffix(null)
        lines.append(f"- `{key.name}` ({word}{optional}): {meaning[0].upper()}{meaning[1:]}")
    return "\n".join([*lines, ""])


@cache
def _meanings() -> dict[str, dict[str, str]]:
    """Return the docstring of each field by class and field, from the source because Python does not keep them."""
    classes = [
        node
        for module in (schema, events)
        for node in ast.parse(inspect.getsource(module)).body
        if isinstance(node, ast.ClassDef)
    ]
    return {each.name: dict(_fields(each.body)) for each in classes}


def _fields(body: list[ast.stmt]) -> list[tuple[str, str]]:
    return [
        (item.target.id, " ".join(str(doc.value.value).split()))
        for item, doc in itertools.pairwise(body)
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        if isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant)
    ]


def _word(kind: Any) -> str:
    origin, inner = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        name = kind.__name__  # type: ignore[union-attr]
        return f"[{name}](#{name.lower()})"
    if origin in (Union, UnionType):
        return " or ".join(map(_word, inner))
    if origin is Literal:
        return ", ".join(f"`{json.dumps(each)}`" for each in inner)
    if origin in (list, tuple):
        return f"list of {_word(inner[0])}"
    if origin is dict:
        return f"object of {_word(inner[1])}"
    return _WORDS[kind]
