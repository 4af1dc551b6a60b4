"""A rule's page as Markdown: what, why, example, when not to worry. For `precast-lint rule` and docs/rules/."""

from __future__ import annotations

import difflib
import textwrap

from precast_lint.model import Applicability, Case, Rule
from precast_lint.selecting.registry import all_rules

__all__ = ["overview", "page"]

_FIX = {
    Applicability.SAFE: "There is a safe fix: `precast-lint fix` applies it.",
    Applicability.UNSAFE: "There is a fix that may change what the program does: `precast-lint fix --unsafe-fixes`.",
    Applicability.NONE: "There is no fix.",
}


def page(rule: Rule) -> str:
    """The page of a rule."""
    state = "" if rule.default else " It is off unless it is selected."
    parts = [
        f"# {rule.code} {rule.name}",
        f"Severity: {rule.severity.value}. {_FIX[rule.fix]}{state}",
        f"## What it finds\n\n{_wrapped(rule.what)}",
        f"## Why\n\n{_wrapped(rule.why)}",
        f"## Example\n\n{_example(rule.invalid[0])}",
        f"## When not to worry\n\n{_wrapped(rule.fine)}",
        "## Cases\n\nIt finds something in these:",
        *(_example(case) for case in rule.invalid[1:]),
        "and nothing in these:",
        *(_example(case) for case in rule.valid),
    ]
    if len(rule.invalid) == 1:
        parts[-len(rule.valid) - 2 : -len(rule.valid)] = ["## Cases\n\nIt finds nothing in these:"]
    return "\n\n".join(parts) + "\n"


def overview() -> str:
    """The table of all rules."""
    rows = [
        f"| [{rule.code}]({rule.code}.md) | {rule.name} | {rule.severity.value} | {rule.fix.value} | "
        f"{'on' if rule.default else 'off'} |"
        for rule in all_rules().values()
    ]
    head = "| code | name | severity | fix | by default |\n|---|---|---|---|---|"
    made = (
        "Written by `python -m tools.rule_pages` from the rules themselves. The first digit of a code says what a rule "
        "is about: 0 old names, 1 misuse of the interface, 2 the scaler and the order of a training step, 3 what is in "
        "a region, 4 numbers that 16 bits cannot hold, 5 speed, data and names that do not exist, 6 the move to "
        "precast. A safe fix is applied by `precast-lint fix`, an unsafe one with `--unsafe-fixes` only. Rules that "
        "are off run where they are selected: [settings](../check.md#settings)."
    )
    rest = (
        "AMP900: a file that mentions mixed precision is not Python. AMP901: a suppression names a code of these and "
        "silences nothing."
    )
    return "\n".join(["# Rules", "", _wrapped(made), "", head, *rows, "", _wrapped(rest), ""])


def _example(case: Case) -> str:
    before = textwrap.dedent(case.code).strip("\n")
    note = _wrapped(case.note) + "\n\n" if case.note else ""
    note += f"With `min-torch` {case.min_torch}:\n\n" if case.min_torch else ""
    if case.fixed is None:
        return f"{note}```py\n{before}\n```"
    after = textwrap.dedent(case.fixed).strip("\n")
    lines = difflib.ndiff(before.splitlines(), after.splitlines())
    changed = "\n".join(line.rstrip() for line in lines if not line.startswith("?"))
    return f"{note}```diff\n{changed}\n```"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 116, break_long_words=False, break_on_hyphens=False)
