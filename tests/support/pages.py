"""The code blocks of a page, made so that what stands behind `# ->` and `# raises` is checked."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

NOT_RUN = {
    "docs/usage.md": 1,
    "docs/integrations.md": 5,
}  # page -> blocks that begin with `# not run: why`

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
_CHECKED = re.compile(r"^( *)(\S.*?) {2}# (->|raises) (.+)$", re.M)


def blocks(page: Path, language: str) -> Iterator[tuple[int, str]]:
    """The line in which each block of a language begins, and its text."""
    text = page.read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        if match[1] == language:
            yield text[: match.start(2)].count("\n"), match[2]


def with_checks(text: str) -> str:
    """`f(x)  # -> 3` becomes a call that compares, in the same line."""

    def call(match: re.Match[str]) -> str:
        indent, expression, kind, expected = match.groups()
        check = "_shows" if kind == "->" else "_raises"
        return f"{indent}{check}(lambda: ({expression}), {expected!r})"

    return _CHECKED.sub(call, text)


def _shows(expression: Any, expected: str) -> None:
    assert repr(expression()) == expected


def _raises(expression: Any, expected: str) -> None:
    name, _, message = expected.partition(": ")
    with pytest.raises(Exception, match=re.escape(message)) as caught:
        expression()
    assert caught.type.__name__ == name


CHECKS = SimpleNamespace(_shows=_shows, _raises=_raises)
