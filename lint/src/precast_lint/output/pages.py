"""Markdown pages of rules, for `precast-lint check --explain` and docs/rules/."""

from __future__ import annotations

import textwrap

from precast_lint.model import Applicability, LintRule
from precast_lint.selecting.registry import all_rules

__all__ = ["overview", "page"]

_FIX = {
    Applicability.SAFE: "There is a safe fix: `precast-lint check --fix` applies it.",
    Applicability.UNSAFE: "There is a fix that may change what the program does: `precast-lint check --fix "
    "--unsafe-fixes`.",
    Applicability.NONE: "There is no fix.",
}


def page(rule: LintRule) -> str:
    """Return the page of a rule."""
    parts = [
        f"# {rule.code} {rule.name}",
        f"Severity: {rule.severity.value}. {_FIX[rule.fix]}",
        f"## What it finds\n\n{_wrapped(rule.what)}",
        f"## Why\n\n{_wrapped(rule.why)}",
        f"## Example\n\n```diff\n{rule.example.strip(chr(10))}\n```",
        f"## When not to worry\n\n{_wrapped(rule.fine)}",
    ]
    return "\n\n".join(parts) + "\n"


def overview() -> str:
    """Return the table of all rules."""
    rows = [
        f"| [{rule.code}]({rule.code}.md) | {rule.name} | {rule.severity.value} | {rule.fix.value} |"
        for rule in all_rules().values()
    ]
    head = "| code | name | severity | fix |\n|---|---|---|---|"
    definition = (
        "Written by `python -m tools.rule_pages`. The first digit of a code is the subject of the rule: "
        "0 old names, 1 misuse of the interface, 2 the scaler and the order of a training step, 3 regions, 4 values "
        "that 16 bits cannot represent. `precast-lint check --fix` applies safe fixes, and unsafe ones with "
        "`--unsafe-fixes`."
    )
    rest = (
        "AMP900: a file that mentions mixed precision cannot be parsed. AMP901: a suppression of one of these codes "
        "suppresses nothing."
    )
    return "\n".join(["# Rules", "", _wrapped(definition), "", head, *rows, "", _wrapped(rest), ""])


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 116, break_long_words=False, break_on_hyphens=False)
