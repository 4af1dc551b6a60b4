"""What rules are made of and what they find: plain values, without LibCST.

Invariants: spans are offsets in the UTF-8 bytes of a file's text; a `Fix` is applied whole or not
at all; a `Finding` that a rule yields has a span inside the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

__all__ = [
    "Applicability",
    "Case",
    "Edit",
    "Finding",
    "Fix",
    "Rule",
    "Severity",
    "Span",
    "version",
]


class Severity(Enum):
    """How bad a finding is."""

    ERROR = "error"
    WARNING = "warning"
    INFORMATION = "information"


class Applicability(Enum):
    """Who may apply a fix: anyone, only who asked for unsafe fixes, or nobody."""

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
    """Puts `text` in the place of the bytes from `start` to `end`."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Fix:
    """Edits that belong together, in any order; they never overlap one another.

    Several findings may carry equal fixes (one import with several uses): it is applied once, and
    only if none of the findings that carry it is suppressed.
    """

    edits: tuple[Edit, ...]
    message: str
    applicability: Applicability = Applicability.SAFE


@dataclass(frozen=True)
class Finding:
    """One place in a file that a rule has something to say about."""

    code: str
    name: str
    severity: Severity
    message: str
    span: Span
    fix: Fix | None = None


@dataclass(frozen=True)
class Case:
    """Source text with what a rule has to say about it; tests and the rule's page are made of them.

    Attributes:
        code: the text. Indentation that all lines share is taken off.
        fixed: the text after the rule's fixes, unsafe ones included; None where nothing may change.
        min_torch: the oldest PyTorch the text is for; None: any that exists today.
        filename: for rules that look at it.
        unsafe: the fix is unsafe; the test then sees to it that safe fixes change nothing.
        count: the number of findings, in invalid cases.
        also: codes of other rules that are selected beside the rule's own.
        note: shown on the page above the case.
    """

    code: str
    fixed: str | None = None
    min_torch: str | None = None
    filename: str = "example.py"
    unsafe: bool = False
    count: int | None = None
    also: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Rule:
    """One rule: what it is called, what it says on its page, its cases, and how it looks.

    Attributes:
        code: "AMP001".
        name: "cuda-autocast".
        severity: of its findings, unless `find` is told otherwise.
        fix: the best fix that it has.
        message: of its findings, unless `find` is told otherwise; one sentence without a full stop.
        what: what it finds. Markdown, as are the next two.
        why: why that matters.
        fine: when not to worry.
        words: a file is only looked at if it contains one of them. An entry of several words, "a b",
            asks for all of them.
        check: yields findings for a file, a `precast_lint.parsing.source.Source`.
        valid: texts that it must be silent about.
        invalid: texts that it must find something in.
        default: selected if nothing is asked for.
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
    check: Callable[[Any], Iterable[Finding]]
    valid: tuple[Case, ...]
    invalid: tuple[Case, ...]
    default: bool = True


def version(text: str) -> tuple[int, ...]:
    """`"2.4.1+cu121"` -> `(2, 4, 1)`.

    Raises:
        ValueError: there is no number at the start.
    """
    release = text.strip().partition("+")[0]
    parts = release.split(".")
    return tuple(int("".join(ch for ch in part if ch.isdigit())) for part in parts[:3])
