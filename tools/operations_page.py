"""Prints `docs/operations.md`: the rule of every operation on every device type, from the policy files.

    python -m tools.operations_page > docs/operations.md

Invariants:
    - The page depends on the policy files alone, not on the machine or the version and build of PyTorch.
    - Not part of the package.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from precast._internal import torch_versions
from precast.policy import toml_file
from precast.policy.policy import DEVICE_TYPES, Entry, Policy

__all__ = ["for_all_versions", "name_of", "note", "page", "row"]

_HEAD = """\
# Operations and their rules

Printed from the policy files by `python -m tools.operations_page`. [Policies](policies.md#rules) explains the
names and the rules.
"""

_TORCH = """
## Policy `torch`

{summary} Each row lists the operations with the same rules. An empty cell
means that there is no rule: the operation runs as it does outside a region. A number refers to a reason below the
table.

"""

_DEFAULT = """
## Policy `default`

{summary} `mixed = "{mixed}"` does so for every
operation with a rule. The rows below are its other changes against `torch`. A row `promote` or `fp32_if_refused` for
an operation without a rule in `torch` applies only where the operation raises an error.

"""

_LEAN = """
## Policy `lean`

{summary} The rows below are its changes against `default`;
[Policies](policies.md#what-lean-changes-and-why) has the measurements.

"""


def page() -> str:
    """The whole page."""
    torch, default, lean = map(for_all_versions, ("torch", "default", "lean"))
    parts = [
        _HEAD,
        _TORCH.format(summary=torch.summary),
        *_lines(_torch_table(torch)),
        _DEFAULT.format(summary=default.summary, mixed=default.mixed),
        *_lines(_changes(torch, default)),
        _LEAN.format(summary=lean.summary),
        *_lines(_changes(default, lean)),
    ]
    return "".join(parts)


def for_all_versions(name: str) -> Policy:
    """The preset with the rows for any PyTorch that precast supports; a row says itself which."""
    tables: dict[str, dict[str, Entry]] = {device: {} for device in DEVICE_TYPES}
    for version in torch_versions.supported():
        contents = toml_file.read(name, version)
        for device, table in contents.tables.items():
            tables[device].update(table)
    return Policy(contents.name, tables, contents.mixed, contents.summary)


def _lines(lines: Iterable[str]) -> Iterator[str]:
    return (f"{line}\n" for line in lines)


def _torch_table(policy: Policy) -> Iterator[str]:
    """Operations grouped by their rules; device types with equal rules share a column."""
    devices = [device for device in DEVICE_TYPES if policy.rules(device)]
    keys = sorted({key for device in devices for key in policy.rules(device)})
    columns: dict[tuple[str, ...], list[str]] = {}
    for device in devices:
        entries = (policy.rules(device).get(key) for key in keys)
        rules = tuple(entry.rule if entry else "" for entry in entries)
        columns.setdefault(rules, []).append(device)
    groups: dict[tuple[str, ...], list[str]] = {}
    for key, *cells in zip(keys, *columns, strict=True):
        groups.setdefault(tuple(cells), []).append(key)
    notes: dict[str, int] = {}
    yield row([*map(", ".join, columns.values()), "operations"])
    yield "|---" * (len(columns) + 1) + "|"
    for rules, group in sorted(groups.items(), key=lambda item: -len(item[1])):
        names = [name_of(key) + _numbers(policy, devices, key, notes) for key in group]
        yield row([*rules, ", ".join(names)])
    yield ""
    yield from (f"{number}. {why}" for why, number in notes.items())


def _numbers(policy: Policy, devices: list[str], key: str, notes: dict[str, int]) -> str:
    """The numbers of an operation's reasons that say more than its rules mean; new ones are added."""
    entries = [policy.rules(device).get(key) for device in devices]
    reasons = {
        note(entry): None for entry in entries if entry and note(entry) != entry.rule.meaning
    }
    return "".join(f" ({notes.setdefault(why, len(notes) + 1)})" for why in reasons)


def note(entry: Entry) -> str:
    """The reason of a row, and where it holds."""
    builds = f"; only in builds for {entry.builds}" if entry.builds else ""
    since = f"; since PyTorch {entry.since}" if entry.since else ""
    until = f"; before PyTorch {entry.until}" if entry.until else ""
    return entry.reason + builds + since + until


def _changes(base: Policy, policy: Policy) -> Iterator[str]:
    """The rows of a policy that its base has not: those alike, on the same device types, as one."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for key in sorted({key for device in DEVICE_TYPES for key in policy.rules(device)}):
        by_change: dict[tuple[str, str], list[str]] = {}
        for device in DEVICE_TYPES:
            before, after = (each.rules(device).get(key) for each in (base, policy))
            if after is not None and after != before:
                was = before.rule if before else "no rule"
                by_change.setdefault((f"{was} -> {after.rule}", note(after)), []).append(device)
        for (change, why), devices in by_change.items():
            where = "all" if len(devices) == len(DEVICE_TYPES) else ", ".join(devices)
            groups.setdefault((change, why, where), []).append(name_of(key))
    yield row(["change", "reason", "device types", "operations"])
    yield "|---|---|---|---|"
    for group, names in sorted(groups.items()):
        yield row([*group, ", ".join(names)])


def name_of(key: str) -> str:
    """An operation as pages spell it."""
    return f"`{key.removeprefix('aten::')}`"


def row(cells: Iterable[str]) -> str:
    """A row of a table."""
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.stdout.write(page())
