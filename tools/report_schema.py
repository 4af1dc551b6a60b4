"""Writes the tables of `docs/report.md` that say what a document holds, from the types that check it.

    python -m tools.report_schema

Invariants: the tables stand between two marks and are written whole; not part of the package.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Any,
    Literal,
    NotRequired,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from precast.diagnostics.report import schema

__all__ = ["PAGE", "tables", "with_tables"]

PAGE = Path(__file__).parent.parent / "docs" / "report.md"
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
    _collect(schema.Document, seen)
    _collect(schema.Merged, seen)
    return "\n".join(_section(kind) for kind in seen)


def with_tables(page: str) -> str:
    """A page with its tables made anew."""
    return _MARKED.sub(lambda found: f"{found[1]}\n{tables()}\n{found[2]}", page)


def _collect(kind: Any, seen: list[Any]) -> None:
    if is_typeddict(kind):
        if kind in seen:
            return
        seen.append(kind)
        for hint in get_type_hints(kind).values():
            _collect(hint, seen)
    for inner in get_args(kind) if get_origin(kind) is not Literal else ():
        _collect(inner, seen)


def _section(kind: Any) -> str:
    meaning = kind.__doc__ if kind.__doc__ and not kind.__doc__.startswith("dict(") else ""
    rows = [f"### {kind.__name__}", "", *_paragraphs(meaning), "| key | is |", "|---|---|"]
    for key, hint in get_type_hints(kind, include_extras=True).items():
        optional = get_origin(hint) is NotRequired
        word = _word(get_args(hint)[0] if optional else hint)
        rows.append(f"| `{key}` | {word}{'; may be missing' if optional else ''} |")
    return "\n".join([*rows, ""])


def _paragraphs(meaning: str) -> list[str]:
    lines = [line.strip() for line in meaning.strip().splitlines()]
    return [*lines, ""] if meaning else []


def _word(kind: Any) -> str:
    origin, inner = get_origin(kind), get_args(kind)
    if is_typeddict(kind):
        return f"[{kind.__name__}](#{kind.__name__.lower()})"
    if origin in (Union, UnionType):
        return " or ".join(map(_word, inner))
    if origin is Literal:
        return " or ".join(f"`{json.dumps(each)}`" for each in inner)
    if origin is list:
        return f"list of {_word(inner[0])}"
    if origin is dict:
        return f"object, name to {_word(inner[1])}"
    return _WORDS[kind]


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
