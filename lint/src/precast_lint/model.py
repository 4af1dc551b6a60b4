"""The data classes of rules and findings, without LibCST.

Invariants: spans are offsets in the UTF-8 bytes of a file's text; a `Fix` is applied whole or not
at all; a `LintFinding` has a span inside the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

__all__ = ["Applicability", "Edit", "Fix", "LintFinding", "LintRule", "Severity", "Span", "version"]


class Severity(Enum):
    """The severity of a finding."""

    ERROR = "error"
    WARNING = "warning"
    INFORMATION = "information"


class Applicability(Enum):
    """The conditions under which a fix is applied: always, with `--unsafe-fixes` only, or never."""

    SAFE = "safe"
    UNSAFE = "unsafe"
    NONE = "none"


@dataclass(frozen=True, order=True)
class Span:
    """Half-open range of bytes."""

    start: int
    end: int


@dataclass(frozen=True, order=True)
class Edit:
    """A replacement of the bytes from `start` to `end` by `text`."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Fix:
    """Edits that are applied together. They do not overlap.

    Several findings may have equal fixes (one import with several uses). Such a fix is applied once, and only if
    none of these findings is suppressed.
    """

    edits: tuple[Edit, ...]
    message: str
    applicability: Applicability = Applicability.SAFE


@dataclass(frozen=True)
class LintFinding:
    """A finding of a rule at one place in a file."""

    code: str
    name: str
    severity: Severity
    message: str
    span: Span
    fix: Fix | None = None


@dataclass(frozen=True)
class LintRule:
    """A rule: its name, the text of its page, and the function that checks a file.

    Attributes:
        code: For example "AMP001".
        name: For example "cuda-autocast".
        severity: Severity of a finding, unless `find` gets another one.
        fix: The best fix that the rule offers.
        message: Message of a finding, unless `find` gets another one; one sentence without a full stop.
        what: Description of the mistake. Markdown, as are the next two.
        why: The harm that it does.
        fine: The circumstances in which the code is right.
        words: A file is parsed only if it contains one of these. An entry of several words, "a b",
            requires all of them.
        check: Yields the findings of a file, a `precast_lint.parsing.source.Source`.
        example: A program before and after the correction, in diff format: each line starts with " ", "-" or "+".
    """

    code: str
    name: str
    severity: Severity
    fix: Applicability
    message: str
    what: str
    why: str
    fine: str
    words: tuple[str, ...]
    check: Callable[[Any], Iterable[LintFinding]]
    example: str


def version(text: str) -> tuple[int, ...]:
    """`"2.4.1+cu121"` -> `(2, 4, 1)`.

    Raises:
        ValueError: there is no number at the start.
    """
    release = text.strip().partition("+")[0]
    parts = release.split(".")
    return tuple(int("".join(ch for ch in part if ch.isdigit())) for part in parts[:3])
