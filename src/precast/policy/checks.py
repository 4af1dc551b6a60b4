"""Checks the arguments of `Policy` and of `Policy.replace`, and turns them into the form that a policy stores.

Invariant: an argument that is not valid raises a `PolicyError` that says which one it was.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType

from precast import _torch
from precast.errors import PolicyError
from precast.policy.module_rules import ModuleRule, parse_module_rule
from precast.policy.patterns import check_pattern
from precast.policy.rows import (
    DEVICE_TYPES,
    Entry,
    Rule,
    canonical,
    check_row,
    overlay,
    parse_entry,
)
from precast.policy.toml_file import Modules
from precast.policy.values import check_mapping, clipped, shown

__all__ = [
    "changed",
    "changed_modules",
    "checked_modules",
    "checked_tables",
    "device_type",
    "is_device_type",
]


def is_device_type(device: object) -> bool:
    """Whether PyTorch has autocast for this device type."""
    return isinstance(device, str) and device in DEVICE_TYPES


def device_type(device: str, where: str = "") -> str:
    """Returns the device type; raises a `PolicyError` if PyTorch has no autocast for it."""
    if not is_device_type(device):
        allowed = ", ".join(DEVICE_TYPES)
        said = f"{where}: {shown(device)}" if where else shown(device)
        raise PolicyError(f"{said} is not a device type with autocast. Allowed: {allowed}")
    return device


def checked_tables(tables: object) -> dict[str, Mapping[str, Entry]]:
    """Returns the tables of a policy in the order of the device types, with each key and row checked."""
    where, example = "Policy(tables=...)", '{"cpu": {"aten::linear": Entry(Rule.LOWER)}}'
    by_device = {device_type(d, where): t for d, t in check_mapping(tables, where, example).items()}
    checked: dict[str, Mapping[str, Entry]] = {}
    for device in filter(by_device.__contains__, DEVICE_TYPES):
        rows = check_mapping(by_device[device], f"{where} {device}", example)
        table = {_key(key): parse_entry(entry, where) for key, entry in rows.items()}
        if table:
            checked[device] = MappingProxyType(table)
    return checked


@functools.lru_cache(1 << 14)
def _known_key(key: str) -> str:
    return canonical(key, "Policy(tables=...)")


def _key(key: object) -> str:
    return _known_key(key) if isinstance(key, str) else canonical(key, "Policy(tables=...)")


def checked_modules(modules: object) -> dict[str, ModuleRule]:
    """Returns the module rules of a policy, with each pattern and rule checked."""
    where = "Policy(modules=...)"
    rules = check_mapping(modules, where, '{"head": ModuleRule(Precision.FP32)}')
    return {check_pattern(p, where): parse_module_rule(rule, where) for p, rule in rules.items()}


def changed(
    table: Mapping[str, Entry], changes: Mapping[str, object], where: str
) -> dict[str, Entry]:
    """Returns `table` with some rows changed; a rule of None removes the row."""
    rows: dict[str, Entry] = {}
    for name, value in changes.items():
        key = canonical(name, where)
        here = f"{where} {clipped(name)}"
        entry = parse_entry(Rule.KEEP if value is None else value, here)
        if entry.is_for(_torch.VERSION):
            check_row(key, entry, here)
            rows[key] = entry
    gone = {canonical(name) for name, value in changes.items() if value is None}
    return {key: entry for key, entry in overlay(table, rows).items() if key not in gone}


def changed_modules(modules: Modules, changes: object) -> Modules:
    """Returns `modules` with some rules changed; a rule of None removes the pattern."""
    where = "replace(modules=...)"
    changes = check_mapping(changes, where, '{"head": "fp32"}')
    rules = {
        check_pattern(pattern, where): parse_module_rule(value, f"{where} {shown(pattern)}")
        for pattern, value in changes.items()
        if value is not None
    }
    kept = {pattern: rule for pattern, rule in modules.items() if pattern not in changes}
    return {**kept, **rules}
