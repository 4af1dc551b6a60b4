"""A policy as a frozen value: the rule of each operation on each device type, and rules for modules.

Invariants:
    - A `Policy` never changes; two are equal if their contents are.
    - A policy can be written to a TOML file and read back without loss.
    - An operation that no table contains runs as it does outside a region.
    - An invalid argument raises a `PolicyError` that names it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import tomllib
import weakref
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from precast import _torch
from precast._internal.display import Card, Displayed, plural
from precast.errors import PolicyError
from precast.policy import preset_files, toml_file
from precast.policy.measured import Measured, check_measured
from precast.policy.module_rules import (
    MODEL_CONTEXT,
    ModuleContext,
    ModuleRule,
    Precision,
    decide,
    parse_module_rules,
)
from precast.policy.patterns import PatternIndex
from precast.policy.rows import (
    DEVICE_TYPES,
    PRODUCT_OPERATIONS,
    Entry,
    Rule,
    canonical,
    check_device_type,
    check_row,
    covered_overloads,
    dispatcher_name,
    exact_key,
    is_device_type,
    overlay,
    parse_entry,
    parse_rows,
    short,
    split,
)
from precast.policy.toml_file import MIXED, Mixed, Modules, PolicyContents, Tables
from precast.policy.values import check_choice, check_mapping, check_text, shown

__all__ = [
    "DEVICE_TYPES",
    "TUNED",
    "Entry",
    "ModuleRule",
    "Policy",
    "Precision",
    "Resolution",
    "Rule",
    "as_policy",
    "derived_values",
    "expanded_rules",
    "module_context",
    "operations_with_product_rules",
    "pattern_index",
    "policy_of",
]


TUNED: Final = "tuned"
"""The name of the policies that `tune` writes."""


class Resolution(NamedTuple):
    """The rule that a policy has for one operation on one device type, and the reason."""

    rule: Rule
    reason: str


@dataclass(frozen=True, repr=False)
class Policy(Displayed):
    """For each device type a table operation -> rule, and rules for modules by name.

    Attributes:
        name: the policy's name in messages and reports.
        tables: device type -> key of the operation -> entry. A key is `aten::linear` (every
            overload that is not an `out=` variant) or `aten::softmax.int`; `.default` is the
            overload with the empty name. An exact row takes precedence over a bare one.
        mixed: the treatment of arguments of different floating dtypes that PyTorch refuses: `raise` keeps PyTorch's
            error, `promote` casts them to the widest dtype.
        summary: one sentence on the purpose of the policy.
        modules: pattern of a module's name -> its rule. They act on models that are attached with this policy only.
        measured: the machine and the method of the policy's measurements: key -> text, number or boolean. `device`,
            `machine` and `torch` are compared with this machine when a region uses the policy, and a difference is a
            warning; the other keys are for people.
        fingerprint: 16 hex digits of a SHA-256 over everything that changes a result in a region: rules and `mixed`.
            Equal policies have equal fingerprints; names, reasons and the order of rows do not count. Nor do `modules`,
            because regions ignore them; modules with rules open regions, whose policies have their own fingerprints.

    Examples:
        >>> policy = Policy.load("torch").replace(ops={"softmax": "lower"})
        >>> policy.resolve("softmax", "cuda").rule
        <Rule.LOWER: 'lower'>
    """

    name: str
    tables: Tables
    mixed: Mixed = "raise"
    summary: str = ""
    modules: Modules = field(default_factory=dict)
    measured: Measured = field(default_factory=dict)
    fingerprint: str = field(init=False, repr=False, compare=False)
    _derived: dict[Hashable, Any] = field(init=False, repr=False, compare=False)
    """A cache for objects that are computed from the policy; it is freed with the policy."""

    def __post_init__(self) -> None:
        check_text(self.name, "Policy(name=...)")
        check_text(self.summary, "Policy(summary=...)")
        check_choice(self.mixed, MIXED, "mixed is ")
        tables = _checked_tables(self.tables)
        where = "Policy(modules=...)"
        rules = check_mapping(self.modules, where, '{"head": ModuleRule(Precision.FP32)}')
        modules = parse_module_rules(rules, where)
        object.__setattr__(self, "tables", MappingProxyType(tables))
        object.__setattr__(self, "modules", MappingProxyType(modules))
        measured = check_measured(self.measured, "Policy(measured=...)")
        object.__setattr__(self, "measured", measured)
        object.__setattr__(self, "_derived", {})
        # Computed now: a compiled function may read it but cannot trace its computation.
        object.__setattr__(self, "fingerprint", _fingerprint(self.mixed, tables))
        _living[id(self)] = self

    def __hash__(self) -> int:
        return hash((self.name, self.fingerprint))

    def __reduce__(self) -> tuple[object, ...]:
        tables = {device: dict(table) for device, table in self.tables.items()}
        arguments = self.name, tables, self.mixed, self.summary, dict(self.modules)
        return type(self), (*arguments, dict(self.measured))

    def _card(self) -> Card:
        title, patterns = f"Policy {self.name!r}", plural(len(self.modules), "rule")
        facts = [
            f"{plural(len(table), 'row')} on {device}" for device, table in self.tables.items()
        ]
        facts += [f"{patterns} for modules"] * bool(self.modules)
        counts = {device: Counter(e.rule for e in t.values()) for device, t in self.tables.items()}
        rules = [
            r
            for r in Rule
            if r not in PRODUCT_OPERATIONS or any(count[r] for count in counts.values())
        ]
        rows = [(d, *(count[rule] or None for rule in rules)) for d, count in counts.items()]
        return Card(title, [*facts, f"mixed dtypes: {self.mixed}"], ("device type", *rules), rows)

    @staticmethod
    def presets() -> tuple[str, ...]:
        """Return the names of the policies that ship with precast."""
        return preset_files.names()

    @classmethod
    def load(cls, name_or_path: str | os.PathLike[str]) -> Policy:
        """Return the preset with that name, or the policy in a TOML file.

        A preset's name may end in a release of PyTorch: `torch@2.11` has the rules of PyTorch 2.11, whichever PyTorch
        is installed.

        Raises:
            PolicyError: neither exists, or the file is not valid; the message names the file, the line or key, the
                value, and what is allowed.
        """
        if isinstance(name_or_path, str) and preset_files.find(name_or_path):
            return _preset(name_or_path)
        return cls(**vars(toml_file.read(name_or_path)))

    @property
    def text(self) -> str:
        """The policy as the text of a TOML file that needs no other one."""
        return toml_file.render(
            PolicyContents(
                self.name, self.summary, self.mixed, self.tables, self.modules, self.measured
            )
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the policy to a TOML file that needs no other one, completely or not at all.

        Raises:
            PolicyError: `path` is no path, or the file cannot be written; the latter is an `OutputError` too.
        """
        toml_file.write(path, self.text)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, with the keys of a policy file."""
        return tomllib.loads(self.text)

    def replace(
        self,
        *,
        name: str | None = None,
        ops: Mapping[str, object] | None = None,
        mixed: Mixed | None = None,
        modules: Mapping[str, object] | None = None,
        measured: Measured | None = None,
    ) -> Policy:
        """Return a new policy with some changes.

        Args:
            name: the new name; None keeps the old one.
            ops: operation -> rule for every device type, and device type -> (operation -> rule) for one. A rule is a
                `Rule`, its name, an `Entry`, or a mapping with `rule` and `reason`; None removes the row. A bare name
                replaces every row that it includes.
            mixed: `raise` or `promote`; None keeps the old value.
            modules: pattern -> rule: `fp32`, `float16`, `bfloat16`, `lower`, `keep`, the name of a float8 rule, or a
                mapping with `dtype`, `ops` and `reason`; None removes the rule.
            measured: the measurements of the new policy. None keeps the old ones if the rules are the same; other rules
                were not measured.

        Raises:
            PolicyError: an operation, a rule, a device type, a pattern or a dtype is invalid.
        """
        ops = check_mapping({} if ops is None else ops, "replace(ops=...)", '{"softmax": "lower"}')
        shared = {key: value for key, value in ops.items() if not is_device_type(key)}
        tables = {}
        for device in DEVICE_TYPES:
            table = _changed(self.tables.get(device, {}), shared, "replace(ops=...)")
            own = ops.get(device, {})
            own = check_mapping(own, f"replace(ops=...): {device}", '{"softmax": "lower"}')
            tables[device] = _changed(table, own, f"replace(ops=...) [{device}]")
        changed = Policy(
            self.name if name is None else name,
            tables,
            self.mixed if mixed is None else mixed,
            self.summary,
            _changed_modules(self.modules, {} if modules is None else modules),
            check_measured(
                {} if measured is None else measured, "replace(measured=...): [measured]"
            ),
        )
        if measured is None and self.measured and changed._has_rules_of(self):
            return dataclasses.replace(changed, measured=self.measured)
        return changed

    def retarget(self, device_type: str = "cpu", like: str = "cuda") -> Policy:
        """Return the policy with the table of device type `like` applied to `device_type`.

        With it, the rules of an accelerator can be tested on a machine without one.
        """
        tables = {**self.tables, check_device_type(device_type, "retarget"): self.rules(like)}
        name = f"{self.name} ({device_type} like {like})"
        return Policy(name, tables, self.mixed, self.summary, self.modules)

    def rules(self, device_type: str) -> Mapping[str, Entry]:
        """Return the table of a device type: key as in the policy -> entry."""
        return self.tables.get(check_device_type(device_type), MappingProxyType({}))

    def resolve(self, op: str, device_type: str, module: str | None = None) -> Resolution:
        """Return the rule for an operation on a device type, and the reason.

        Args:
            op: the dispatcher's name, `aten::` optional: `linear`, `softmax.int`, `mylib::myop`.
                A name without overload means all that are not `out=` variants.
            device_type: a device type, such as `cuda`.
            module: the name of a module of an attached model, for an operation inside of it; None for an operation that
                no rule in `modules` applies to.

        Raises:
            PolicyError: no such operation; or a bare name with overloads that have different rules.

        Examples:
            >>> policy = Policy.load("torch").replace(modules={"*.head": "fp32"})
            >>> policy.resolve("linear", "cpu", module="model.head").rule
            <Rule.KEEP: 'keep'>
        """
        if module is not None:
            return self._resolve_inside(module_context(self, module), op, device_type)
        where = f"the operation {shown(op)}"
        key = canonical(op, where)
        table = self.rules(device_type)
        check_row(key, table.get(key, Entry(Rule.KEEP)), where)
        operation, overload = split(key)
        if overload is not None:
            return self._resolution(_find(table, operation, overload), key, device_type)
        entries = {name: _find(table, operation, name) for name in _overloads_or_bare(operation)}
        resolutions = {n: self._resolution(entry, key, device_type) for n, entry in entries.items()}
        if len({resolution.rule for resolution in resolutions.values()}) > 1:
            listed = ", ".join(
                f"{short(exact_key(operation, name or 'default'))} ({resolution.rule})"
                for name, resolution in resolutions.items()
            )
            raise PolicyError(f"the overloads of {key} differ; name one of them: {listed}")
        return next(iter(resolutions.values()))

    def _has_rules_of(self, other: Policy) -> bool:
        rules = ((policy.fingerprint, policy.modules) for policy in (self, other))
        return next(rules) == next(rules)

    def _resolve_inside(self, inside: ModuleContext, op: str, device_type: str) -> Resolution:
        resolution = self.replace(ops=inside.ops).resolve(op, device_type)
        if not inside.sources:
            return resolution
        by = ", ".join(f"{pattern!r} for {name!r}" for name, pattern in inside.sources)
        if not inside.enabled:
            return Resolution(Rule.KEEP, f"autocast is off, inputs are float32 ([modules] {by})")
        to = f" to {inside.dtype}" if inside.dtype and resolution.rule is Rule.LOWER else ""
        return Resolution(resolution.rule, f"{resolution.reason}{to} ([modules] {by})")

    def _resolution(self, entry: Entry | None, key: str, device_type: str) -> Resolution:
        if entry is None:
            reason = f"no row for {short(key)} on {device_type} in the policy {self.name!r}"
            return Resolution(Rule.KEEP, f"{reason}: {Rule.KEEP.meaning}")
        return Resolution(entry.rule, f"{entry.reason} ({entry.origin or self.name})")


_living: Final[weakref.WeakValueDictionary[int, Policy]] = weakref.WeakValueDictionary()
"""All existing policies, by their `id`."""


def as_policy(policy: Policy | str | os.PathLike[str]) -> Policy:
    """Return a policy itself, or load the preset or the file of that name."""
    return policy if isinstance(policy, Policy) else Policy.load(policy)


def derived_values(policy: Policy) -> dict[Hashable, Any]:
    """Return the cache for objects that other files compute from a policy; it is freed with the policy."""
    return policy._derived


def expanded_rules(policy: Policy, device_type: str) -> tuple[dict[str, Entry], tuple[str, ...]]:
    """Return the table of a device type with bare names replaced by their overloads.

    Returns:
        The entries by the dispatcher's names (`aten::softmax.int`; no suffix for the default
        overload), and the keys that the installed torch has no operator for (yet): custom
        operations that are not imported, operations of another build.
    """
    table = policy.rules(device_type)
    entries: dict[str, Entry] = {}
    unknown = []
    for key in sorted(table, key=lambda key: split(key)[1] is not None):  # exact rows win
        names = _dispatcher_names(key)
        entries |= dict.fromkeys(names, table[key])
        if not names:
            unknown.append(key)
    return entries, tuple(unknown)


def module_context(policy: Policy, module: str) -> ModuleContext:
    """Return the state inside a module of that name, from the rules for it and for those that contain it."""
    check_text(module, "the name of a module")
    inside, special = MODEL_CONTEXT, operations_with_product_rules(policy)
    components = module.split(".") if module else []
    for name in (".".join(components[:depth]) for depth in range(len(components) + 1)):
        matching = pattern_index(policy).matching(name)
        if matching:
            pattern, rule = decide(matching, policy.modules, name) or ("", None)
            inside = inside.then(inside.with_products(rule, special), name, pattern)
    return inside


def operations_with_product_rules(policy: Policy) -> frozenset[str]:
    """Return the operations with a rule for products on some device type, not counting `modules`."""
    operations: frozenset[str] | None = policy._derived.get("operations with product rules")
    if operations is None:
        rows = (row for table in policy.tables.values() for row in table.items())
        operations = frozenset(
            split(key)[0] for key, entry in rows if entry.rule in PRODUCT_OPERATIONS
        )
        policy._derived["operations with product rules"] = operations
    return operations


def pattern_index(policy: Policy) -> PatternIndex:
    """Return an index of the names and patterns in `modules`."""
    index: PatternIndex | None = policy._derived.get("pattern index")
    if index is None:
        index = policy._derived["pattern index"] = PatternIndex(policy.modules)
    return index


def policy_of(fingerprint: str) -> Policy:
    """Return an existing policy with this fingerprint."""
    living = (reference() for reference in _living.valuerefs())
    return next(policy for policy in living if policy and policy.fingerprint == fingerprint)


def _checked_tables(tables: object) -> dict[str, Mapping[str, Entry]]:
    """Return the tables of a policy in the order of the device types, with each key and row checked."""
    where, example = "Policy(tables=...)", '{"cpu": {"aten::linear": Entry(Rule.LOWER)}}'
    by_device = {
        check_device_type(d, where): t for d, t in check_mapping(tables, where, example).items()
    }
    checked: dict[str, Mapping[str, Entry]] = {}
    for device in filter(by_device.__contains__, DEVICE_TYPES):
        rows = check_mapping(by_device[device], f"{where} {device}", example)
        table = {canonical(key, where): parse_entry(entry, where) for key, entry in rows.items()}
        if table:
            checked[device] = MappingProxyType(table)
    return checked


def _changed(
    table: Mapping[str, Entry], changes: Mapping[str, object], where: str
) -> dict[str, Entry]:
    """Return `table` with some rows changed; a rule of None removes the row."""
    without_rule = {name for name, value in changes.items() if value is None}
    rows = parse_rows({**changes, **dict.fromkeys(without_rule, Rule.KEEP)}, where)
    removed = {canonical(name) for name in without_rule}
    return {key: entry for key, entry in overlay(table, rows).items() if key not in removed}


def _changed_modules(modules: Modules, changes: object) -> Modules:
    """Return `modules` with some rules changed; a rule of None removes the pattern."""
    where = "replace(modules=...)"
    changes = check_mapping(changes, where, '{"head": "fp32"}')
    rules = {pattern: rule for pattern, rule in changes.items() if rule is not None}
    others = {pattern: rule for pattern, rule in modules.items() if pattern not in changes}
    return {**others, **parse_module_rules(rules, where)}


def _fingerprint(mixed: str, tables: Tables) -> str:
    lines: list[str] = [mixed]
    for device, table in sorted(tables.items()):
        lines += [f"{device} {key} {entry.rule}" for key, entry in sorted(table.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


@functools.cache
def _preset(name: str) -> Policy:
    return Policy(**vars(toml_file.read(name)))


def _find(table: Mapping[str, Entry], operation: str, overload: str) -> Entry | None:
    """Return the entry that applies to one overload (`""` and `default` are the same)."""
    exact = table.get(exact_key(operation, overload))
    bare = table.get(operation)
    covered = {name or "default" for name in _overloads_or_bare(operation)}
    return exact or (bare if (overload or "default") in covered else None)


def _overloads_or_bare(operation: str) -> list[str]:
    """Return the overloads that a bare name includes; one without a name if torch does not have the operation."""
    return covered_overloads(operation) or [""]


def _dispatcher_names(key: str) -> list[str]:
    """Return the installed operators that a key includes."""
    operation, overload = split(key)
    if overload is None:
        names = [exact_key(operation, name) for name in covered_overloads(operation)]
    else:
        overloads = _torch.operator_overloads(operation)
        names = [key] if ("" if overload == "default" else overload) in overloads else []
    return [dispatcher_name(name) for name in names]
