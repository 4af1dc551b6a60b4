"""A policy as the shortest file that says the same: a preset as its base, and what is different.

Invariants: the file is whole: alone, saved under any name, it gives every operation the rule that the policy does.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from precast.policy import toml_file
from precast.policy.module_rules import ModuleRule
from precast.policy.policy import Policy
from precast.policy.rows import DEVICE_TYPES, Entry, Rule, split
from precast.policy.toml_file import Contents, Tables

__all__ = ["whole_file"]

_HEAD = 3  # lines of a rendered policy before its tables: name, summary, mixed


def whole_file(policy: Policy, *, ops: Mapping[str, object] | None = None) -> str:
    """A policy file that says what `policy` says, with rules for operations changed.

    Args:
        policy: what holds now.
        ops: as for `Policy.replace`: device type -> (operation -> rule).
    """
    base = _nearest(policy)
    changed = policy.replace(ops=ops) if ops else policy
    rows = _different(changed, base)
    tables = {device: table for device, table in rows.items() if table}
    contents = Contents(tables=tables, modules=_different_modules(changed, base))
    mixed = "raise" if base is None else base.mixed
    head = [] if base is None else [f'base = "{base.name}"']
    head += [] if changed.mixed == mixed else [f'mixed = "{changed.mixed}"']
    body = toml_file.render(contents).splitlines()[_HEAD:]
    return "\n".join([*head, *(line for line in body if not line.startswith("#"))]).strip() + "\n"


@functools.lru_cache(maxsize=64)
def _nearest(policy: Policy) -> Policy | None:
    """The preset from which it differs in the fewest rows; None where writing all of them is shorter."""
    presets = [Policy.load(name) for name in Policy.presets()]
    same = [base for base in presets if _is_said_by(policy, base)]
    return min([*same, None], key=lambda base: _size(_different(policy, base)), default=None)


def _different(policy: Policy, base: Policy | None) -> dict[str, dict[str, Entry]]:
    """The rows to write above a base; a row that only the base has becomes `keep`, which is what no row means."""
    found: dict[str, dict[str, Entry]] = {}
    for device in DEVICE_TYPES:
        mine, theirs = policy.entries(device), base.entries(device) if base else {}
        gone = {
            key: Entry(Rule.KEEP)
            for key in theirs
            if key not in mine
            and split(key)[0] not in mine  # a bare name's row takes exact ones away
        }
        found[device] = gone | {
            key: Entry(entry.rule)
            for key, entry in mine.items()
            if key not in theirs or theirs[key].rule is not entry.rule
        }
    return found


def _different_modules(policy: Policy, base: Policy | None) -> dict[str, ModuleRule]:
    known = base.modules if base else {}
    return {pattern: rule for pattern, rule in policy.modules.items() if known.get(pattern) != rule}


def _is_said_by(policy: Policy, base: Policy) -> bool:
    """Whether a base and the rows above it give each operation its rule: a bare name's row covers exact ones."""
    if any(pattern not in policy.modules for pattern in base.modules):
        return False
    both = base.replace(ops=_different(policy, base))
    return all(_rules(both, device) == _rules(policy, device) for device in DEVICE_TYPES)


def _rules(policy: Policy, device: str) -> dict[str, Rule]:
    known, _ = policy.expand(device)
    return {op: entry.rule for op, entry in known.items() if entry.rule is not Rule.KEEP}


def _size(tables: Tables) -> int:
    return sum(len(table) for table in tables.values())
