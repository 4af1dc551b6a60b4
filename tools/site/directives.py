"""Directives of a page to the build: HTML comments on lines of their own, which are replaced.

    <!-- program: 07_softmax.py naive_softmax -->    text of a program, or of one function or class of it
    <!-- output: 08_scaler.py -->                    what it prints; arguments may follow
    <!-- picture: 08_checkerboard.py -->             what is drawn from it
    <!-- rules: default cpu -->                      the rules of a policy on a device type
    <!-- difference: default torch cpu -->           where a policy differs from another
    <!-- schema: report -->                          the keys of a report's data

Invariants:
    - A comment that looks like one of these but is misspelt is a problem; others, and code blocks, are left alone.
    - A problem says its page and line; one does not hide the others.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

__all__ = ["Asked", "PageError", "asked", "expanded", "outside_code"]

_COMMENT = re.compile(r"^(?P<indent>[ >]*)<!--\s*(?P<kind>[\w-]+):\s*(?P<words>.*?)\s*-->\s*$")
_FENCE = re.compile(r"^[ >]*(`{3,}|~{3,})")
KINDS = ("program", "output", "picture", "rules", "difference", "schema")


@dataclass(frozen=True)
class Asked:
    """One directive: in which line, what kind, which words, and what stands before it in its line."""

    line: int
    kind: str
    words: tuple[str, ...]
    indent: str = ""


class PageError(Exception):
    """A problem of a directive or a link; its message has the place once that is known."""


def asked(text: str) -> Iterator[Asked]:
    """All directives of a page, from top to bottom."""
    for number, line in outside_code(text):
        match = _COMMENT.match(line)
        if match and difflib.get_close_matches(match["kind"], KINDS):
            yield Asked(number, match["kind"], tuple(match["words"].split()), match["indent"])


def expanded(
    text: str, makers: Mapping[str, Callable[[Asked], str]]
) -> tuple[str, list[tuple[int, str]]]:
    """A page with each directive replaced by what its maker gives, and lines with problems.

    Args:
        text: the page.
        makers: a function for each kind; it may raise `PageError`.
    """
    lines, problems = text.split("\n"), []
    for each in asked(text):
        try:
            if each.kind not in makers:
                raise PageError(
                    f"there is no {each.kind!r} to put in; there are {', '.join(KINDS)}"
                )
            replacement = makers[each.kind](each).rstrip("\n").split("\n")
            lines[each.line - 1] = "\n".join((each.indent + line).rstrip() for line in replacement)
        except PageError as problem:
            problems.append((each.line, str(problem)))
    return "\n".join(lines), problems


def outside_code(text: str) -> Iterator[tuple[int, str]]:
    """The lines of a page that are in no code block, numbered from 1."""
    fence = ""
    for number, line in enumerate(text.split("\n"), 1):
        mark = _FENCE.match(line)
        if not fence and not mark:
            yield number, line
        elif not fence and mark:
            fence = mark[1]
        elif mark and mark[1].startswith(fence) and not line.strip(" >`~"):
            fence = ""
