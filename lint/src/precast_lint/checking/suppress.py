"""Comments that silence findings: `# noqa`, `# noqa: AMP001`, `# precast: noqa` for a whole file.

Invariants: a comment counts for all lines of the statement's line that it ends (a finding is looked up by
the row in which it begins and the row in which its statement's logical line ends); only codes of ours
can be unused, never a bare `# noqa`.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass

from precast_lint.model import Span
from precast_lint.parsing.text import Text

__all__ = ["Comment", "Suppressions"]

_NOQA = re.compile(r"#\s*noqa\b(?::\s*(?P<codes>[A-Z]+[0-9]+(?:[,\s]+[A-Z]+[0-9]+)*))?", re.I)
_FILE = re.compile(
    r"#\s*precast:\s*noqa\b(?::\s*(?P<codes>[A-Z]+[0-9]+(?:[,\s]+[A-Z]+[0-9]+)*))?", re.I
)


@dataclass(frozen=True)
class Comment:
    """One suppression: its codes (None: all), where it stands, the rows that it covers."""

    codes: frozenset[str] | None
    span: Span
    rows: range
    whole_file: bool = False


class Suppressions:
    """The suppressions of one file."""

    def __init__(self, text: Text) -> None:
        self.comments = list(_comments(text)) if b"noqa" in text.data.lower() else []
        self.used: set[tuple[Comment, str]] = set()

    def silences(self, code: str, row: int) -> bool:
        """Return True if a finding is silenced; remembers which comment did it."""
        silent = False
        for comment in self.comments:
            if not comment.whole_file and row not in comment.rows:
                continue
            if comment.codes is None or code in comment.codes:
                self.used.add((comment, code))
                silent = True
        return silent

    def unused(self) -> Iterator[tuple[Comment, list[str]]]:
        """The comments with codes of ours that silenced nothing, and those codes."""
        for comment in self.comments:
            ours = sorted(c for c in comment.codes or () if c.startswith("AMP") and c != "AMP901")
            rest = [code for code in ours if (comment, code) not in self.used]
            if rest:
                yield comment, rest


def _comments(text: Text) -> Iterator[Comment]:
    start_row = None
    pending: list[tuple[re.Match[str], tuple[int, int]]] = []
    for token in _tokens(text):
        if token.type == tokenize.COMMENT:
            whole = _FILE.search(token.string)
            if whole:
                yield _comment(text, whole, token.start, range(0), whole_file=True)
            elif match := _NOQA.search(token.string):
                if start_row is None:
                    yield _comment(
                        text, match, token.start, range(token.start[0], token.start[0] + 1)
                    )
                else:
                    pending.append((match, token.start))
        elif token.type in (tokenize.NEWLINE, tokenize.ENDMARKER):
            for match, at in pending:  # the last line's comment covers its whole logical line
                first = start_row if at[0] == token.start[0] and start_row else at[0]
                yield _comment(text, match, at, range(first, at[0] + 1))
            start_row, pending = None, []
        elif token.type not in (tokenize.NL, tokenize.INDENT, tokenize.DEDENT) and not start_row:
            start_row = token.start[0]


def _tokens(text: Text) -> Iterator[tokenize.TokenInfo]:
    try:
        yield from tokenize.generate_tokens(io.StringIO(text.string, newline="").readline)
    except (tokenize.TokenError, SyntaxError):
        return


def _comment(
    text: Text, match: re.Match[str], at: tuple[int, int], rows: range, whole_file: bool = False
) -> Comment:
    row, column = at
    line = text.line(row)
    start = text.starts[row - 1] + len(line[: column + match.start()].encode("utf-8"))
    codes = match["codes"]
    named = frozenset(re.split(r"[,\s]+", codes.upper())) if codes else None
    return Comment(named, Span(start, start + len(match[0].encode("utf-8"))), rows, whole_file)
