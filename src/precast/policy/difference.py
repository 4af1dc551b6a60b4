"""The difference between two policies, and its effect on dtypes and memory (`precast explain --diff`).

Invariants:

- nothing is printed here;
- a preset that is pinned to a release of PyTorch has the complete table of that release, including operations that the
  installed PyTorch does not have;
- the effect follows from the two rules alone, for 16-bit and for float32 arguments; tests run operations under both
  rules and compare.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from precast._internal.display import plural
from precast._internal.records import as_json
from precast.policy import preset_files, toml_file
from precast.policy.module_rules import ModuleRule
from precast.policy.policy import DEVICE_TYPES, Policy, Rule, as_policy, expanded_rules
from precast.policy.rows import (
    FLOAT8_RULES,
    FLOAT32_RULES,
    covered_overloads,
    dispatcher_name,
    exact_key,
    short,
    split,
)

__all__ = ["ModuleChange", "PolicyDifference", "RuleChange", "explain_difference"]

_NO_RULE: Final = "no rule"
_DEPENDENT: Final = {Rule.LOWER_OUT_FP32, Rule.FP32_IF_REFUSED}
"""Rules under which the dtype of the result depends on more than the dtype of the arguments."""
_ARGUMENTS: Final = ("16-bit", "float32")
_FORMATS: Final = {16: "16 bits", 32: "float32"}
_BYTES: Final = {16: "two", 32: "four"}
_MIXED: Final = {
    "raise": "where PyTorch refuses arguments of different dtypes, its error stays",
    "promote": "where PyTorch refuses arguments of different dtypes, an operation that has a rule runs in the widest",
}


@dataclass(frozen=True)
class RuleChange:
    """Operations whose rule differs in the same way on the same device types."""

    operations: tuple[str, ...]
    """As a policy file spells them."""
    devices: tuple[str, ...]
    before: str
    """The rule in the first policy, or `no rule`."""
    after: str
    """The rule in the second."""
    meaning: tuple[str, ...]
    """The effect, in sentences."""


@dataclass(frozen=True)
class ModuleChange:
    """A pattern in `[modules]` with different rules in the two policies."""

    pattern: str
    before: str
    """The rule in the first policy, or `no rule`."""
    after: str


@dataclass(frozen=True)
class PolicyDifference:
    """All differences between two policies that can change a result."""

    before: str
    """The name of the first policy."""
    after: str
    changes: tuple[RuleChange, ...]
    mixed: tuple[str, str] | None
    """The settings for mixed dtypes in the two policies; None if they are equal."""
    modules: tuple[ModuleChange, ...]

    def __bool__(self) -> bool:
        return bool(self.changes or self.mixed or self.modules)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "before": self.before,
            "after": self.after,
            "equal": not self,
            "summary": self.summary(),
            "changes": as_json(self.changes),
            "mixed": self.mixed and {"before": self.mixed[0], "after": self.mixed[1]},
            "modules": as_json(self.modules),
        }

    def summary(self) -> list[str]:
        """Return a line for each kind of difference, with its number of operations or modules."""
        operations: dict[str, set[str]] = {}
        for change in self.changes:
            names = operations.setdefault(f"{change.before} -> {change.after}", set())
            names.update(change.operations)
        most_first = sorted(operations.items(), key=lambda item: -len(item[1]))
        lines = [f"{plural(len(names), 'operation')}: {change}" for change, names in most_first]
        if self.mixed:
            lines.append(f"mixed dtypes: {self.mixed[0]} -> {self.mixed[1]}")
        if self.modules:
            lines.append(f"{plural(len(self.modules), 'rule')} for modules")
        return lines

    def render(self) -> RenderableType:
        """Return the differences for display: a summary, then operations and modules."""
        if not self:
            return Text(f"{self.before} and {self.after} have the same rules.")
        lines: list[RenderableType] = [Text(f"From {self.before} to {self.after}")]
        lines += [_indented(text) for text in self.summary()]
        for change in self.changes:
            lines += [Text(), Text(", ".join(change.operations), "bold")]
            where = f"on {', '.join(change.devices)}: {change.before} -> {change.after}"
            lines += [_indented(text) for text in (where, *change.meaning)]
        if self.mixed:
            lines += [Text(), Text("mixed dtypes", "bold")]
            lines += [_indented(f"{self.mixed[0]} -> {self.mixed[1]}")]
            lines += [_indented(f"Now, {_MIXED[self.mixed[1]]}.")]
        for module in self.modules:
            lines += [Text(), Text(f"modules {module.pattern!r}", "bold")]
            lines += [_indented(f"{module.before} -> {module.after}")]
        return Group(*lines)


def explain_difference(
    before: Policy | str | os.PathLike[str], after: Policy | str | os.PathLike[str]
) -> PolicyDifference:
    """Compare two policies."""
    first, second = _complete(before), _complete(after)
    return PolicyDifference(
        first.name,
        second.name,
        tuple(_changes(first, second)),
        None if first.mixed == second.mixed else (first.mixed, second.mixed),
        tuple(_module_changes(first, second)),
    )


def _complete(policy: Policy | str | os.PathLike[str]) -> Policy:
    """Return the policy; for a preset that is pinned to a release, with all rows of the release."""
    preset = preset_files.find(policy)
    if preset is None or preset.release is None:
        return as_policy(policy)
    file = toml_file.read(preset.path.stem, preset.release)
    return Policy(str(policy), file.tables, file.mixed, file.summary)


# --- operations ---


def _changes(first: Policy, second: Policy) -> Iterator[RuleChange]:
    by_operation: dict[tuple[str, str, str], list[str]] = {}
    for device in DEVICE_TYPES:
        before, after = (_rules(policy, device) for policy in (first, second))
        for name in sorted(before.keys() | after.keys()):
            rules = before.get(name), after.get(name)
            if rules[0] is not rules[1]:
                key = name, str(rules[0] or _NO_RULE), str(rules[1] or _NO_RULE)
                by_operation.setdefault(key, []).append(device)
    alike: dict[tuple[tuple[str, ...], str, str], list[str]] = {}
    for (name, old, new), devices in by_operation.items():
        alike.setdefault((tuple(devices), old, new), []).append(name)
    for (devices_, old, new), names in sorted(alike.items(), key=lambda item: item[1]):
        yield RuleChange(tuple(_spelled(names)), devices_, old, new, tuple(_meaning(old, new)))


def _rules(policy: Policy, device: str) -> dict[str, Rule]:
    """Return the rule of each overload by dispatcher name, and of missing operations by the name in the row."""
    installed, missing = expanded_rules(policy, device)
    rows = policy.rules(device)
    return {name: entry.rule for name, entry in installed.items()} | {
        key: rows[key].rule for key in missing
    }


def _spelled(names: list[str]) -> Iterator[str]:
    """Yield names as in a policy file: one name if all overloads of an operation are listed."""
    remaining = set(names)
    for name in sorted(names):
        operation = split(name)[0]
        every = {
            dispatcher_name(exact_key(operation, each)) for each in covered_overloads(operation)
        }
        if name not in remaining:
            continue
        if every and every <= remaining:
            remaining -= every
            yield short(operation)
        else:
            remaining.discard(name)
            is_default = split(name)[1] is None and bool(every)
            yield short(exact_key(name, "default") if is_default else name)


# --- the effect of a difference ---


def _meaning(old: str, new: str) -> Iterator[str]:
    """Yield the effect of another rule: on 16-bit arguments, on float32 arguments, and on mixtures."""
    if Rule.BANNED in (old, new):
        yield "It is refused now." if new == Rule.BANNED else "It was refused, and now runs."
        return
    if not _DEPENDENT & {old, new}:
        for arguments, before, after in zip(_ARGUMENTS, _dtypes(old), _dtypes(new), strict=True):
            if before != after:
                yield (
                    f"With {arguments} arguments it computes in {_FORMATS[after]} instead of {_FORMATS[before]}: its "
                    f"result has {_BYTES[after]} bytes an element instead of {_BYTES[before]}."
                )
    if new == Rule.FP32:
        yield "Copies in float32 stay in memory if backward needs them."
    yield f"Now: {_meaning_of(new)}. Before: {_meaning_of(old)}."


def _meaning_of(rule: str) -> str:
    if rule == _NO_RULE:
        return "it runs unchanged, and the operations that it calls follow their own rules"
    return Rule(rule).meaning


def _dtypes(rule: str) -> tuple[int, int]:
    """Return the bits of the result, for arguments in the region's 16 bits, and for arguments in float32."""
    if rule in FLOAT32_RULES:
        return 32, 32
    return (16, 16) if rule == Rule.LOWER or rule in FLOAT8_RULES else (16, 32)


# --- modules ---


def _module_changes(first: Policy, second: Policy) -> Iterator[ModuleChange]:
    for pattern in dict.fromkeys((*first.modules, *second.modules)):
        rules = first.modules.get(pattern), second.modules.get(pattern)
        if not _are_equal(*rules):
            old, new = (str(rule) if rule else _NO_RULE for rule in rules)
            yield ModuleChange(pattern, old, new)


def _are_equal(first: ModuleRule | None, second: ModuleRule | None) -> bool:
    if first is None or second is None:
        return first is second
    return first.agrees_with(second)


def _indented(text: str) -> RenderableType:
    return Padding(Text(text), (0, 0, 0, 2))
