"""Short policy files: the most similar preset as the base, and the rows that differ from it.

Invariant: the file is complete. It gives every operation the same rule as the policy does.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from precast.policy import preset_files, toml_file
from precast.policy.module_rules import ModuleRule
from precast.policy.policy import Policy, expanded_rules
from precast.policy.rows import DEVICE_TYPES, Entry, Rule, split
from precast.policy.toml_file import PolicyContents, Tables

__all__ = ["whole_file"]

_HEAD = 3  # lines of a rendered policy before its tables: name, summary, mixed


def whole_file(
    policy: Policy,
    *,
    ops: Mapping[str, object] | None = None,
    modules: Mapping[str, object] | None = None,
    with_reasons: bool = False,
) -> str:
    """Return the text of a policy file for `policy`, optionally with some rules changed."""
    base = _nearest(policy)
    changed = policy.replace(ops=ops or {}, modules=modules or {}) if ops or modules else policy
    rows = _different(changed, base, with_reasons=with_reasons)
    tables = {device: table for device, table in rows.items() if table}
    modules = _different_modules(changed, base)
    contents = PolicyContents(tables=tables, modules=modules, measured=changed.measured)
    mixed = "raise" if base is None else base.mixed
    head = [] if base is None else [f'base = "{base.name}"']
    head += [] if changed.mixed == mixed else [f'mixed = "{changed.mixed}"']
    body = toml_file.render(contents).splitlines()[_HEAD:]
    return "\n".join([*head, *(line for line in body if not line.startswith("#"))]).strip() + "\n"


@functools.lru_cache(maxsize=64)
def _nearest(policy: Policy) -> Policy | None:
    """Return the preset with the fewest rows that differ from the policy; None if writing all rows is shorter."""
    pinned = [policy.name] if "@" in policy.name and preset_files.is_preset(policy.name) else []
    presets = [Policy.load(name) for name in (*Policy.presets(), *pinned)]
    same = [base for base in presets if _is_expressible(policy, base)]
    return min([*same, None], key=lambda base: _size(_different(policy, base)), default=None)


def _different(
    policy: Policy, base: Policy | None, *, with_reasons: bool = False
) -> dict[str, dict[str, Entry]]:
    """Return the rows that differ from the base. A row that only the base has becomes `keep`, which equals no row."""
    rows: dict[str, dict[str, Entry]] = {}
    for device in DEVICE_TYPES:
        mine, theirs = policy.rules(device), base.rules(device) if base else {}
        removed = {
            key: Entry(Rule.KEEP)
            for key in theirs
            # The row of a bare name replaces the base's rows for its overloads.
            if key not in mine and split(key)[0] not in mine
        }
        rows[device] = removed | {
            key: entry if with_reasons else Entry(entry.rule)
            for key, entry in mine.items()
            if key not in theirs or theirs[key].rule is not entry.rule
        }
    return rows


def _different_modules(policy: Policy, base: Policy | None) -> dict[str, ModuleRule]:
    base_rules = base.modules if base else {}
    return {
        pattern: rule for pattern, rule in policy.modules.items() if base_rules.get(pattern) != rule
    }


def _is_expressible(policy: Policy, base: Policy) -> bool:
    """Return True if the base and the different rows give every operation its rule: a bare name may hide others."""
    if any(pattern not in policy.modules for pattern in base.modules):
        return False
    both = base.replace(ops=_different(policy, base))
    return all(_rules(both, device) == _rules(policy, device) for device in DEVICE_TYPES)


def _rules(policy: Policy, device: str) -> dict[str, Rule]:
    entries, _ = expanded_rules(policy, device)
    return {op: entry.rule for op, entry in entries.items() if entry.rule is not Rule.KEEP}


def _size(tables: Tables) -> int:
    return sum(len(table) for table in tables.values())
