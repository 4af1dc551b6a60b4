"""All rules: each module `rules/ampNNN_name.py` holds one as `RULE`, or a table of them as `RULES`.

Invariant: a rule's module is loaded when a file has to be parsed for it. The data that is needed before is in
`index.py`, which `python -m tools.rule_pages` writes; `all_rules` loads the modules.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from precast_lint.model import LintRule

__all__ = ["ENGINE", "Short", "all_rules", "expand", "index", "load", "modules"]

# What the engine itself reports: code -> name.
ENGINE = {"AMP900": "syntax-error", "AMP901": "unused-suppression"}
_PACKAGE = "precast_lint.rules"


class Short(NamedTuple):
    """A rule's data that is available without loading its module."""

    code: str
    module: str
    name: str
    severity: str
    words: tuple[str, ...]


@functools.cache
def index() -> dict[str, Short]:
    """Return the short data of every rule by its code, in the order of the codes."""
    from precast_lint.selecting.index import RULES

    return {row[0]: Short(*row) for row in RULES}


def load(name: str) -> LintRule | None:
    """Return a rule by its code or name; None if there is none."""
    entry = index().get(name.upper())
    entry = entry or next((r for r in index().values() if r.name == name.lower()), None)
    if entry is None:
        return None
    return next(rule for rule in _rules(entry.module) if rule.code == entry.code)


@functools.cache
def modules() -> list[tuple[str, LintRule]]:
    """Return every rule with the name of its module, in the order of the codes; loads them all."""
    import pkgutil

    package = import_module(_PACKAGE)
    names = [m.name for m in pkgutil.iter_modules(package.__path__) if m.name.startswith("amp")]
    results = [(name, rule) for name in names for rule in _rules(name)]
    return sorted(results, key=lambda row: row[1].code)


def all_rules() -> dict[str, LintRule]:
    """Return every rule by its code, in the order of the codes; loads them all."""
    return {rule.code: rule for _, rule in modules()}


def _rules(module: str) -> tuple[LintRule, ...]:
    result = import_module(f"{_PACKAGE}.{module}")
    several: tuple[LintRule, ...] | None = getattr(result, "RULES", None)
    return several or (result.RULE,)


def expand(selectors: Iterable[str]) -> frozenset[str]:
    """Return the codes of some selectors: codes, names and prefixes ("AMP2", "ALL").

    Raises:
        ValueError: a selector matches no rule.
    """
    codes: set[str] = set()
    for selector in selectors:
        expected = selector.strip().upper()
        entry = {rule.code: rule.name for rule in index().values()} | ENGINE
        fits = {
            code
            for code, name in entry.items()
            if expected == "ALL"
            or (code.startswith(expected) and expected)
            or name.upper() == expected
        }
        if not fits:
            raise ValueError(
                f"{selector!r} matches no rule: pass a code (AMP001), the beginning of codes (AMP0), a name or ALL"
            )
        codes |= fits
    return frozenset(codes)
