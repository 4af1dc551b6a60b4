"""How results look where they are displayed: one line of text, and in a notebook a heading and a small table.

Invariants:
- showing a result changes nothing and waits for no device: it uses only what is on the host already;
- all text is escaped in HTML, since a program's names and paths may contain any character.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, Final

__all__ = ["Card", "Displayed", "milliseconds", "size"]

_MOST_ROWS: Final = 10


@dataclass(frozen=True, slots=True)
class Card:
    """What is displayed of a value: ``<what: facts>`` as text; the same above a table in a notebook."""

    what: str
    facts: Sequence[str]
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[Any]] = field(default=())
    """The cells under `columns`; None is an empty cell. Only the first ten rows are shown."""
    rest: str = "rows"
    """What the rows beyond these ten are called, as in "and 5 more rows"."""

    def text(self) -> str:
        """The card as one line of text."""
        return f"<{self.what}: {', '.join(self.facts)}>"

    def html(self) -> str:
        """The card as a fragment of HTML without styles or scripts."""
        head = f"<p><b>{escape(self.what)}</b>: {escape(', '.join(self.facts))}</p>"
        if not self.rows:
            return head
        left = len(self.rows) - _MOST_ROWS
        more = f"<p>and {left:,} more {escape(self.rest)}</p>" if left > 0 else ""
        body = "".join(_row("td", row) for row in self.rows[:_MOST_ROWS])
        table = f"<table><thead>{_row('th', self.columns)}</thead><tbody>{body}</tbody></table>"
        return f"{head}{table}{more}"


class Displayed:
    """A base class that gives a `repr` of one line and, in notebooks, a table."""

    __slots__ = ()

    @abstractmethod
    def _card(self) -> Card:
        """What is displayed."""

    def __repr__(self) -> str:
        return self._card().text()

    def _repr_html_(self) -> str:
        return self._card().html()


def milliseconds(seconds: float) -> str:
    """A time as text with three significant digits, in milliseconds below one second."""
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def size(count: int, one: str, many: str = "") -> str:
    """A number with what it counts: "1 step", "2,000 steps"."""
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"


def _row(cell: str, values: Iterable[Any]) -> str:
    cells = (f"<{cell}>{_text(value)}</{cell}>" for value in values)
    return f"<tr>{''.join(cells)}</tr>"


def _text(value: Any) -> str:
    if value is None:
        return ""
    return escape(f"{value:,}" if type(value) is int else str(value))
