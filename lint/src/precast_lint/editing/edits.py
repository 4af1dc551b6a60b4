"""Application of fixes to the bytes of a text.

Invariants: bytes outside the edits stay; a fix is applied whole; of fixes at one place the first is applied, and the
others wait for the next pass; a fix whose result does not parse is dropped.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterable, Sequence

from precast_lint.model import Edit, Fix
from precast_lint.parsing.syntax import cst

__all__ = ["apply", "compatible", "compiles", "parses"]


def apply(data: bytes, edits: Iterable[Edit]) -> bytes:
    """Return the text after edits that do not overlap."""
    parts = []
    at = 0
    for edit in sorted(edits):
        parts += [data[at : edit.start], edit.text.encode("utf-8")]
        at = edit.end
    return b"".join([*parts, data[at:]])


def compatible(fixes: Iterable[Fix]) -> list[Fix]:
    """Return the fixes that can be applied together, the first of each conflict; equal ones once."""
    chosen: dict[Fix, None] = {}
    in_body: list[Edit] = []
    for fix in sorted(set(fixes), key=lambda fix: fix.edits):
        new = [edit for edit in fix.edits if edit not in in_body]
        if not any(_collide(edit, other) for edit in new for other in in_body):
            chosen[fix] = None
            in_body += new
    return list(chosen)


def _collide(one: Edit, other: Edit) -> bool:
    """Return True for edits that overlap, or two insertions at one place, whose order would be unknown."""
    if one.start == other.start:
        return True
    first, second = sorted((one, other))
    return second.start < first.end


def parses(data: bytes, like: bytes) -> bool:
    """Return True if a changed text is Python: for LibCST, and for this Python if the text before it was."""
    try:
        cst.parse_module(data.decode("utf-8"))
    except (cst.ParserSyntaxError, RecursionError):
        return False
    return compiles(data) or not compiles(like)


def compiles(data: bytes | str) -> bool:
    """Return True if this Python can parse a text."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(data)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def apply_parsing(data: bytes, fixes: Sequence[Fix]) -> tuple[bytes, list[Fix]]:
    """Apply compatible fixes, without those after which the text is not Python."""
    fixes = list(fixes)
    merged = apply(data, {edit for fix in fixes for edit in fix.edits})
    if not fixes or parses(merged, data):
        return merged, fixes
    if len(fixes) == 1:
        return data, []
    good = [fix for fix in fixes if apply_parsing(data, [fix])[1]]
    if len(good) == len(fixes):  # each one alone parses, but not all together: apply one now
        good = good[:1]
    return apply_parsing(data, good)
