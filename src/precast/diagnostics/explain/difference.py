"""`precast explain --diff`: which rules differ between two policies, and what that means for dtypes and memory.

Invariants:
    - Nothing is printed here.
    - A preset that is pinned to a release of PyTorch has the release's whole table here, also operations that the
      installed PyTorch does not have.
    - What a difference means follows from the two rules alone, for 16-bit and for float32 arguments; tests run
      operations under both rules and compare.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from precast import _torch
from precast._internal.display import size
from precast.policy import preset_files, toml_file
from precast.policy.module_rules import ModuleRule
from precast.policy.policy import DEVICE_TYPES, Policy, Rule, as_policy
from precast.policy.rows import (
    FLOAT8_RULES,
    covered_overloads,
    dispatcher_name,
    exact_key,
    short,
    split,
)

__all__ = ["Change", "ModuleChange", "PolicyDifference", "explain_difference"]

_NO_RULE: Final = "no rule"
_IN_FLOAT32: Final = (Rule.FP32, Rule.FP32_SET_DTYPE, Rule.FP32_APPEND_DTYPE)
_MIXED: Final = {
    "raise": "where PyTorch refuses arguments of different dtypes, its error stays",
    "promote": "where PyTorch refuses arguments of different dtypes, an operation that has a rule runs in the widest",
}


@dataclass(frozen=True)
class Change:
    """Operations whose rule differs in the same way on the same device types."""

    operations: tuple[str, ...]
    """As a policy file spells them."""
    devices: tuple[str, ...]
    before: str
    """The rule in the first policy, or `no rule`."""
    after: str
    """The rule in the second."""
    meaning: tuple[str, ...]
    """What that changes, in sentences."""


@dataclass(frozen=True)
class ModuleChange:
    """A pattern in `[modules]` that the two policies have different rules for."""

    pattern: str
    before: str
    """What the first says, or `no rule`."""
    after: str


@dataclass(frozen=True)
class PolicyDifference:
    """All in which two policies differ that changes a result."""

    before: str
    """The name of the first policy."""
    after: str
    changes: tuple[Change, ...]
    mixed: tuple[str, str] | None
    """What the two say of mixed dtypes; None where they say the same."""
    modules: tuple[ModuleChange, ...]

    def __bool__(self) -> bool:
        return bool(self.changes or self.mixed or self.modules)

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return {
            "before": self.before,
            "after": self.after,
            "equal": not self,
            "summary": self.summary(),
            "changes": [
                {
                    "operations": list(change.operations),
                    "devices": list(change.devices),
                    "before": change.before,
                    "after": change.after,
                    "meaning": list(change.meaning),
                }
                for change in self.changes
            ],
            "mixed": self.mixed and {"before": self.mixed[0], "after": self.mixed[1]},
            "modules": [vars(change) for change in self.modules],
        }

    def summary(self) -> list[str]:
        """Return a line on each kind of difference, with the number of operations or modules that it concerns."""
        operations: dict[str, set[str]] = {}
        for change in self.changes:
            names = operations.setdefault(f"{change.before} -> {change.after}", set())
            names.update(change.operations)
        most_first = sorted(operations.items(), key=lambda item: -len(item[1]))
        lines = [f"{size(len(names), 'operation')}: {change}" for change, names in most_first]
        if self.mixed:
            lines.append(f"mixed dtypes: {self.mixed[0]} -> {self.mixed[1]}")
        if self.modules:
            lines.append(f"{size(len(self.modules), 'rule')} for modules")
        return lines

    def render(self) -> RenderableType:
        """The differences in words: how many there are, then those of operations and of modules."""
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
    """In what two policies differ, and what that means.

    Args:
        before: a policy, the name of a preset such as `torch` or `torch@2.11`, or the path of a policy file.
        after: the one that it is compared with.

    Raises:
        PolicyError: one of them cannot be read.
    """
    first, second = _whole(before), _whole(after)
    return PolicyDifference(
        first.name,
        second.name,
        tuple(_changes(first, second)),
        None if first.mixed == second.mixed else (first.mixed, second.mixed),
        tuple(_module_changes(first, second)),
    )


def _whole(given: Policy | str | os.PathLike[str]) -> Policy:
    """The policy; of a preset that is pinned to a release, all rows that the release has."""
    preset = preset_files.find(given)
    if preset is None or preset.release is None:
        return as_policy(given)
    found = toml_file.read(preset.path.stem, preset.release)
    return Policy(str(given), found.tables, found.mixed, found.summary)


# --- operations ---


def _changes(first: Policy, second: Policy) -> Iterator[Change]:
    by_operation: dict[tuple[str, str, str], list[str]] = {}
    for device in DEVICE_TYPES:
        before, after = (_rules(policy, device) for policy in (first, second))
        for name in sorted(before.keys() | after.keys()):
            rules = before.get(name), after.get(name)
            if rules[0] is not rules[1]:
                key = name, str(rules[0] or _NO_RULE), str(rules[1] or _NO_RULE)
                by_operation.setdefault(key, []).append(device)
    alike: dict[tuple[tuple[str, ...], str, str], list[str]] = {}
    for (name, was, now), devices in by_operation.items():
        alike.setdefault((tuple(devices), was, now), []).append(name)
    for (devices_, was, now), names in sorted(alike.items(), key=lambda item: item[1]):
        meaning = (*_meaning(was, now), *_of_what_it_calls(names, was, now))
        yield Change(tuple(_spelled(names)), devices_, was, now, meaning)


def _rules(policy: Policy, device: str) -> dict[str, Rule]:
    """The rule of each overload, by the dispatcher's name; of operations that are not installed, by the row's."""
    known, unknown = policy.expand(device)
    rows = policy.entries(device)
    return {name: entry.rule for name, entry in known.items()} | {
        key: rows[key].rule for key in unknown
    }


def _spelled(names: list[str]) -> Iterator[str]:
    """As a policy file has them: one name where all overloads of an operation are there."""
    left = set(names)
    for name in sorted(names):
        operation = split(name)[0]
        every = {
            dispatcher_name(exact_key(operation, each)) for each in covered_overloads(operation)
        }
        if name not in left:
            continue
        if every and every <= left:
            left -= every
            yield short(operation)
        else:
            left.discard(name)
            is_default = split(name)[1] is None and bool(every)
            yield short(exact_key(name, "default") if is_default else name)


# --- what a difference means ---


def _meaning(was: str, now: str) -> Iterator[str]:
    """What another rule changes, in sentences: for 16-bit arguments, for those in float32, and for mixtures."""
    if Rule.BANNED in (was, now):
        yield "It is refused now." if now == Rule.BANNED else "It was refused, and now runs."
        return
    yield from _in_8_bits(was, now)
    before, after = _dtypes(was), _dtypes(now)
    if before[0] != after[0]:
        if after[0] == 32:
            yield (
                "With 16-bit arguments it computes in float32 instead of 16 bits: its result has four bytes an element "
                "instead of two, as has what follows until an operation casts to 16 bits."
            )
            yield from _casts(now, "and their copies in float32 are kept where backward needs them")
        else:
            yield (
                "With 16-bit arguments it computes in 16 bits instead of float32: its result has two bytes an element "
                "instead of four, and the precision of 16 bits."
            )
    if before[1] != after[1]:
        if after[1] == 16:
            yield (
                "With float32 arguments it computes in 16 bits instead of float32: they are cast, and its result has "
                "two bytes an element instead of four."
            )
        else:
            yield (
                "With float32 arguments it computes in float32 instead of 16 bits: its result has four bytes an "
                "element instead of two."
            )
    if before == after and not {was, now} & set(FLOAT8_RULES):
        yield from _same_dtypes(was, now)


def _in_8_bits(was: str, now: str) -> Iterator[str]:
    """What changes where one of the rules multiplies matrices in 8 bits."""
    if was in FLOAT8_RULES and now in FLOAT8_RULES:
        yield f"Now, {Rule(now).meaning}; before, {Rule(was).meaning}."
    elif now in FLOAT8_RULES:
        yield f"Now, {Rule(now).meaning}: operands keep 4 bits of their numbers. Its result has the region's dtype."
    elif was in FLOAT8_RULES:
        yield f"Before, {Rule(was).meaning}; that ends."


def _of_what_it_calls(names: list[str], was: str, now: str) -> Iterator[str]:
    """That operations which only call others may differ from `_meaning`, where a rule lets these follow their own."""
    follow = {_NO_RULE, str(Rule.FALLTHROUGH)}
    composite = (_torch.is_composite(_torch.find_overload(name)) for name in names)
    if follow & {was, now} and any(composite):
        yield "Without a rule, the operations that it calls follow theirs, which may cast in their turn."


def _dtypes(rule: str) -> tuple[int, int]:
    """How many bits its result has, where its arguments have the region's 16 bits, and where they have 32."""
    if rule in _IN_FLOAT32:
        return 32, 32
    return (16, 16) if rule == Rule.LOWER or rule in FLOAT8_RULES else (16, 32)


def _casts(rule: str, kept: str) -> Iterator[str]:
    if rule == Rule.FP32:
        yield f"The arguments are cast, {kept}."
    elif rule in _IN_FLOAT32:
        yield "The arguments are not cast: it converts while it computes."


def _same_dtypes(was: str, now: str) -> Iterator[str]:
    """What rules differ in that give arguments of one dtype the same."""
    if Rule.PROMOTE in (was, now):
        promotes = "are cast to the widest dtype among them"
        other = "are left to PyTorch, which may refuse them"
        order = (promotes, other) if now == Rule.PROMOTE else (other, promotes)
        yield f"Only arguments of different dtypes differ: they {order[0]}; before, they {order[1]}."
    elif {was, now} <= set(_IN_FLOAT32):
        yield "Its result is in float32 with both; they differ in whether the arguments are cast, or the call converts."
    else:
        off = "autocast is off in what it calls"
        on = "the operations that it calls follow their own rules, unless PyTorch's autocast lists the operation itself"
        order = (off, on) if now == Rule.KEEP else (on, off)
        yield f"The dtypes of its arguments are the same. Now, {order[0]}; before, {order[1]}."


# --- modules ---


def _module_changes(first: Policy, second: Policy) -> Iterator[ModuleChange]:
    for pattern in dict.fromkeys((*first.modules, *second.modules)):
        rules = first.modules.get(pattern), second.modules.get(pattern)
        if not _say_the_same(*rules):
            was, now = (str(rule) if rule else _NO_RULE for rule in rules)
            yield ModuleChange(pattern, was, now)


def _say_the_same(first: ModuleRule | None, second: ModuleRule | None) -> bool:
    if first is None or second is None:
        return first is second
    return first.agrees_with(second)


def _indented(text: str) -> RenderableType:
    return Padding(Text(text), (0, 0, 0, 2))
