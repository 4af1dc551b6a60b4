"""Writes the tables of `docs/report-data.md` that say what a document holds, from the classes that read and write it.

    python -m tools.report_schema

Invariants: the tables stand between two marks and are written whole; what a key means is the docstring below its field;
not part of the package.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import json
import re
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from precast._internal import events
from precast._internal.records import keys_of
from precast.report import health_schema, schema

__all__ = ["PAGE", "tables", "with_tables"]

PAGE = Path(__file__).parent.parent / "docs" / "report-data.md"
_MARKED = re.compile(r"(<!-- python -m tools.report_schema -->\n).*?(<!-- end -->)", re.S)
_WORDS = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    NoneType: "null",
    Any: "anything",
}


def tables() -> str:
    """A section for each type, those that are inside another after it."""
    seen: list[Any] = []
    _collect(schema.RunDocument, seen)
    _collect(schema.MergedDocument, seen)
    return "\n".join(_section(kind) for kind in seen)


def with_tables(page: str) -> str:
    """A page with its tables made anew."""
    return _MARKED.sub(lambda found: f"{found[1]}\n{tables()}\n{found[2]}", page)


def _collect(kind: Any, seen: list[Any]) -> None:
    if dataclasses.is_dataclass(kind):
        if kind in seen:
            return
        seen.append(kind)
        known: Any = kind
        for key in keys_of(known):
            _collect(key.type, seen)
    for inner in get_args(kind) if get_origin(kind) is not Literal else ():
        _collect(inner, seen)


def _section(kind: Any) -> str:
    meaning = [line.strip() for line in kind.__doc__.strip().splitlines()]
    rows = [f"### {kind.__name__}", "", *meaning, "", "| key | is | meaning |", "|---|---|---|"]
    for key in keys_of(kind):
        missing = "; may be missing" if key.may_be_missing else ""
        null = " or null" if key.is_left_out else ""
        said = _meanings()[kind.__name__][key.field]
        rows.append(f"| `{key.name}` | {_word(key.type).removesuffix(null)}{missing} | {said} |")
    return "\n".join([*rows, ""])


@cache
def _meanings() -> dict[str, dict[str, str]]:
    """Class -> field -> its docstring, which Python does not keep: read from the source."""
    classes = [
        node
        for module in (schema, health_schema, events)
        for node in ast.parse(inspect.getsource(module)).body
        if isinstance(node, ast.ClassDef)
    ]
    return {each.name: dict(_fields(each.body)) for each in classes}


def _fields(body: list[ast.stmt]) -> list[tuple[str, str]]:
    return [
        (item.target.id, " ".join(str(said.value.value).split()))
        for item, said in itertools.pairwise(body)
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        if isinstance(said, ast.Expr) and isinstance(said.value, ast.Constant)
    ]


def _word(kind: Any) -> str:
    origin, inner = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        name = kind.__name__  # type: ignore[union-attr]
        return f"[{name}](#{name.lower()})"
    if origin in (Union, UnionType):
        return " or ".join(map(_word, inner))
    if origin is Literal:
        return " or ".join(f"`{json.dumps(each)}`" for each in inner)
    if origin in (list, tuple):
        return f"list of {_word(inner[0])}"
    if origin is dict:
        return f"object, name to {_word(inner[1])}"
    return _WORDS[kind]


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
