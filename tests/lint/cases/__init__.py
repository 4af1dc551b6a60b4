"""The cases of the rules: programs in which a rule reports something, and programs in which it reports nothing.

`AMPnnn.txt` holds the cases of a rule. A line `=== wrong OPTIONS: note` or `=== right OPTIONS: note` starts a
case. The program follows; where the rule's fix changes it, it is written as a diff, with both versions in one text.

Options: `count=N` findings (1 if missing), `min_torch=VERSION`, `also=AMP001,AMP002` (other rules to select), `unsafe`
(the fix is unsafe although the rule has safe fixes), `severity=information` (that of all findings).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from precast_lint.model import Applicability, LintRule
from precast_lint.selecting.registry import all_rules

__all__ = ["ALL", "Case", "cases", "versions"]

_FOLDER = Path(__file__).parent
_HEAD = re.compile(r"^=== (wrong|right)((?: [\w=.,]+)*)(?::.*)?\n", re.MULTILINE)


@dataclass(frozen=True)
class Case:
    """A program, its expected findings, and the program after the fix.

    Attributes:
        rule: The rule that the case belongs to.
        code: The program.
        fixed: The program after all fixes; the same as `code` where nothing may change.
        count: The expected number of findings.
        min_torch: The oldest PyTorch that the program supports; None: any.
        codes: The rules to select.
        unsafe: True if the fix is unsafe, so that safe fixes change nothing.
        severity: The severity of all findings; None: not tested.
    """

    rule: LintRule
    code: str
    fixed: str
    count: int
    min_torch: str | None
    codes: frozenset[str]
    unsafe: bool
    severity: str | None = None


def versions(text: str) -> tuple[str, str]:
    """Return both versions of a program in diff format. A text that is no diff is its own second version."""
    lines = text.strip("\n").split("\n")
    if not any(line.startswith(("-", "+")) for line in lines):
        return text, text
    before, after = (
        "\n".join(line[1:] for line in lines if not line.startswith(sign)) for sign in "+-"
    )
    return before.strip("\n") + "\n", after.strip("\n") + "\n"


def cases(rule: LintRule) -> list[Case]:
    """Return the cases of a rule: both versions of its example, then those of its file."""
    before, after = versions(rule.example)
    has_fix = rule.fix is not Applicability.NONE
    is_unsafe = rule.fix is Applicability.UNSAFE
    codes = frozenset({rule.code})
    result = [
        Case(rule, before, after if has_fix else before, 1, None, codes, is_unsafe),
        Case(rule, after, after, 0, None, codes, is_unsafe),
    ]
    pieces = _HEAD.split((_FOLDER / f"{rule.code}.txt").read_text(encoding="utf-8"))
    assert pieces[0] == ""
    for kind, words, text in zip(pieces[1::3], pieces[2::3], pieces[3::3], strict=True):
        options = dict(word.partition("=")[::2] for word in words.split())
        before, after = versions(text.strip("\n") + "\n")
        count = int(options.get("count", 1)) if kind == "wrong" else 0
        also = codes | set(filter(None, options.get("also", "").split(",")))
        unsafe = is_unsafe or "unsafe" in options
        oldest, severity = options.get("min_torch"), options.get("severity")
        result.append(Case(rule, before, after, count, oldest, also, unsafe, severity))
    return result


ALL = [case for rule in all_rules().values() for case in cases(rule)]
