"""The display of results: one line of text, and in a notebook a heading and a small table.

Invariants:
- displaying a result changes nothing and waits for no device: it uses only values that are already on the host;
- all text is escaped in HTML, because a program's names and paths may contain any character.
"""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape
from pathlib import Path
from typing import Any, Final, TextIO

__all__ = ["Card", "Displayed", "aligned", "dtype_name", "milliseconds", "plural"]
__all__ += ["shown_path", "terminal_width", "wrapped"]

_MOST_ROWS: Final = 10


@dataclass(frozen=True, slots=True)
class Card:
    """The display of a value: ``<what: facts>`` as text; in a notebook the same above a table."""

    what: str
    facts: Sequence[str]
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[Any]] = field(default=())
    """The cells under `columns`; None is an empty cell. Only the first ten rows are shown."""
    rest: str = "rows"
    """A plural noun for the rows beyond the first ten, as in "and 5 more rows"."""

    def text(self) -> str:
        """Return the card as one line of text."""
        return f"<{self.what}: {', '.join(self.facts)}>"

    def html(self) -> str:
        """Return the card as a fragment of HTML without styles or scripts."""
        head = f"<p><b>{escape(self.what)}</b>: {escape(', '.join(self.facts))}</p>"
        if not self.rows:
            return head
        hidden = len(self.rows) - _MOST_ROWS
        more = f"<p>and {hidden:,} more {escape(self.rest)}</p>" if hidden > 0 else ""
        body = "".join(_row("td", row) for row in self.rows[:_MOST_ROWS])
        table = f"<table><thead>{_row('th', self.columns)}</thead><tbody>{body}</tbody></table>"
        return f"{head}{table}{more}"


class Displayed:
    """A base class with a `repr` of one line and, in notebooks, a table."""

    __slots__ = ()

    @abstractmethod
    def _card(self) -> Card:
        """Return the card to display."""

    def __repr__(self) -> str:
        return self._card().text()

    def _repr_html_(self) -> str:
        return self._card().html()


def milliseconds(seconds: float) -> str:
    """Return a time as text with three significant digits, in milliseconds below one second."""
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def plural(count: int, one: str, many: str = "") -> str:
    """Return a number with its noun: "1 step", "2,000 steps"; `many` is a plural that does not end in "s"."""
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"


@cache
def dtype_name(dtype: object) -> str:
    """Return a dtype as text without "torch.": "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def shown_path(path: str | Path, folder: Path) -> Path:
    """Return a path relative to a folder, if it is below that."""
    path = Path(path)
    return path.relative_to(folder) if path.is_relative_to(folder) else path


def terminal_width(stream: TextIO | None) -> int:
    """Return the number of columns of the terminal at `stream`, from 40 to 200; 80 where there is none.

    The environment variable COLUMNS has priority.
    """
    columns = os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isdecimal() else 0
    if width == 0 and stream is not None:
        with contextlib.suppress(OSError, ValueError):
            width = os.get_terminal_size(stream.fileno()).columns
    return min(max(width or 80, 40), 200)


def wrapped(text: str, width: int, first: str = "", rest: str = "") -> list[str]:
    """Return a text in lines of at most a width; longer words, such as paths, are not broken."""
    wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    wrapper.initial_indent, wrapper.subsequent_indent = first, rest
    return wrapper.wrap(text)


def aligned(rows: Sequence[Sequence[str]], width: int = sys.maxsize) -> list[str]:
    """Return the rows of a table as lines; if one is longer than `width`, a block of lines for each row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    if max(map(len, lines)) <= width:
        return lines
    blocks: list[str] = []
    for row in rows[1:]:
        blocks += wrapped(row[0], width)
        for name, cell in zip(rows[0][1:], row[1:], strict=True):
            blocks += wrapped(f"{name}: {cell}", width, "    ", "        ")
    return blocks


def _row(cell: str, values: Iterable[Any]) -> str:
    cells = (f"<{cell}>{_text(value)}</{cell}>" for value in values)
    return f"<tr>{''.join(cells)}</tr>"


def _text(value: Any) -> str:
    if value is None:
        return ""
    return escape(f"{value:,}" if type(value) is int else str(value))
