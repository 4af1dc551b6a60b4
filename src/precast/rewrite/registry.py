"""All rules: each module `rules/ampNNN_name.py` holds one, as `RULE`; and which of them are selected."""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Iterable
from importlib import import_module

from precast.rewrite import rules as package
from precast.rewrite.model import Rule

__all__ = ["ENGINE", "TO_PRECAST", "all_rules", "expand", "find_rule", "url"]

# What the engine itself reports: code -> name.
ENGINE = {"AMP900": "syntax-error", "AMP901": "unused-suppression"}
# What `precast fix --to precast` selects. The first is a choice, not a fault: only its own code or name selects it.
TO_PRECAST = ("AMP601", "AMP001", "AMP002", "AMP003", "AMP004", "AMP005", "AMP006", "AMP007")
_PAGES = "docs/rules"  # in the repository, which has no address yet


@functools.cache
def all_rules() -> dict[str, Rule]:
    """Every rule by its code, in the order of the codes."""
    names = sorted(m.name for m in pkgutil.iter_modules(package.__path__) if m.name[:3] == "amp")
    found = [import_module(f"{package.__name__}.{name}").RULE for name in names]
    return {rule.code: rule for rule in sorted(found, key=lambda rule: rule.code)}


def find_rule(name: str) -> Rule | None:
    """A rule by its code or its name."""
    by_code = all_rules().get(name.upper())
    return by_code or next((r for r in all_rules().values() if r.name == name.lower()), None)


def expand(selectors: Iterable[str]) -> frozenset[str]:
    """Codes, names and prefixes ("AMP2", "ALL") as codes.

    Raises:
        ValueError: one of them fits no rule.
    """
    codes: set[str] = set()
    for selector in selectors:
        wanted = selector.strip().upper()
        known = {rule.code: rule.name for rule in all_rules().values()} | ENGINE
        fits = {
            code
            for code, name in known.items()
            if (wanted == "ALL" and code != TO_PRECAST[0])
            or (code.startswith(wanted) and wanted)
            or name.upper() == wanted
        }
        if not fits:
            raise ValueError(
                f"{selector!r} is no rule: give a code (AMP001), the beginning of codes (AMP0), a name or ALL"
            )
        codes |= fits
    return frozenset(codes)


def url(code: str) -> str:
    """Where a rule's page is; what the engine itself reports is on the page of all rules."""
    return f"{_PAGES}/{'README' if code in ENGINE else code}.md"
