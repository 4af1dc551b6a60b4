"""How results look where they are displayed: one line of text, and in a notebook a heading and a small table.

Invariants:
- what is shown is computed from what is there: nothing is changed, judged or read from a device that works on its own;
- all text is escaped, as names and paths of a program may hold anything.
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
    """Under `columns`; None is an empty cell. The first ten are shown."""
    rest: str = "rows"
    """What the others are called: "and 5 more rows"."""

    def text(self) -> str:
        """One line."""
        return f"<{self.what}: {', '.join(self.facts)}>"

    def html(self) -> str:
        """A fragment of HTML without styles or scripts."""
        head = f"<p><b>{escape(self.what)}</b>: {escape(', '.join(self.facts))}</p>"
        if not self.rows:
            return head
        left = len(self.rows) - _MOST_ROWS
        more = f"<p>and {left:,} more {escape(self.rest)}</p>" if left > 0 else ""
        body = "".join(_row("td", row) for row in self.rows[:_MOST_ROWS])
        table = f"<table><thead>{_row('th', self.columns)}</thead><tbody>{body}</tbody></table>"
        return f"{head}{table}{more}"


class Displayed:
    """Has a `repr` of one line and, for notebooks, a table."""

    __slots__ = ()

    @abstractmethod
    def _card(self) -> Card:
        """What is displayed."""

    def __repr__(self) -> str:
        return self._card().text()

    def _repr_html_(self) -> str:
        return self._card().html()


def milliseconds(seconds: float) -> str:
    """A time, with three digits."""
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
    return escape(
        f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    )
