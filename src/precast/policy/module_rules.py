"""A policy's rules for modules: what each means, which one decides, and what follows where modules nest.

Invariants:
    - Among the rules that match a module an exact name decides; patterns with stars that disagree are an error.
    - What holds inside a module follows from its rule and from what holds around it, and from nothing else.
    - Every problem is a `PolicyError` that begins with where it was found.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from precast import _torch
from precast._internal.torch_versions import Version
from precast.errors import PolicyError
from precast.policy.patterns import check_pattern
from precast.policy.rows import (
    FLOAT8_OPERATIONS,
    FLOAT8_RULES,
    Entry,
    Rule,
    canonical,
    parse_entry,
    parse_rows,
)
from precast.policy.values import check_choice, check_mapping, check_text, shown

__all__ = [
    "AROUND",
    "Found",
    "Inside",
    "ModuleRule",
    "Precision",
    "decide",
    "parse_module_rule",
    "parse_module_rules",
]


class Precision(enum.StrEnum):
    """What a rule does with a module's inputs and with the region inside the module."""

    FP32 = "fp32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    LOWER = "lower"
    KEEP = "keep"


_KEYS: Final = ("dtype", "ops", "reason")
_DTYPES: Final = {"float32": "fp32", "float16": "float16", "bfloat16": "bfloat16"}
_IN_16_BITS: Final = (Precision.FLOAT16, Precision.BFLOAT16, Precision.LOWER)


@dataclass(frozen=True)
class ModuleRule:
    """What holds for a module and all that it calls.

    A float8 rule's name in place of the dtype is short for a row with that rule for each product of matrices.

    Attributes:
        dtype: `fp32`: inputs are cast to float32, and autocast is off inside; `float16`, `bfloat16`: inputs are cast
            to it, and it is the dtype of the region inside; `lower`: the same with the dtype of the region around,
            also where an outer module has switched autocast off; with each of the three, products that are in 8 bits
            around the module are in 16 bits inside, unless `ops` says otherwise; `keep`: as if no rule matched; None:
            as around it.
        ops: rows laid over the policy in force inside, by the operation's key; for every device type.
        reason: why, in a few words.
        origin: the file and key where it was written; it does not count when rules are compared.
    """

    dtype: Precision | None
    ops: Mapping[str, Entry] = field(default_factory=dict)
    reason: str = ""
    origin: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        where = check_text(self.origin, "a ModuleRule's origin") or "ModuleRule"
        if self.dtype is not None and type(self.dtype) is not Precision:
            object.__setattr__(self, "dtype", _precision(self.dtype, where))
        check_text(self.reason, f"{where}: the reason")
        rows = check_mapping(self.ops, f"{where}: ops", '{"aten::softmax": Entry(Rule.LOWER)}')
        ops = {canonical(key, where): parse_entry(entry, where) for key, entry in rows.items()}
        object.__setattr__(self, "ops", MappingProxyType(ops))

    def __hash__(self) -> int:
        return hash((self.dtype, self.reason, frozenset(self.ops)))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.dtype, dict(self.ops), self.reason, self.origin)

    def __str__(self) -> str:
        short = self.float8
        rows = {k: e for k, e in self.ops.items() if not (short and k in FLOAT8_OPERATIONS)}
        ops = ", ".join(f"{key.removeprefix('aten::')} = {e.rule}" for key, e in rows.items())
        dtype = self.dtype or short
        return " with ".join([*([dtype] if dtype else []), *([ops] if ops else [])])

    @property
    def float8(self) -> Rule | None:
        """The float8 rule that all products of matrices have; None where they have none or several, or a dtype."""
        rules = {e.rule if e is not None else None for e in map(self.ops.get, FLOAT8_OPERATIONS)}
        rule = rules.pop() if len(rules) == 1 and self.dtype is None else None
        return rule if rule in FLOAT8_RULES else None

    def says_as(self, other: ModuleRule) -> bool:
        """Whether both mean the same; reasons may differ."""
        return self._meaning == other._meaning

    @functools.cached_property
    def _meaning(self) -> tuple[object, ...]:
        return self.dtype, {key: entry.rule for key, entry in self.ops.items()}


@dataclass(frozen=True)
class Inside:
    """What holds inside a module, where its region is one around the model in which autocast is on.

    Attributes:
        enabled: whether autocast is on.
        dtype: `float16` or `bfloat16`; None is the dtype of the region around the model, whatever that is.
        ops: rows laid over its policy.
        because: the modules and patterns that made it so, outermost first; of those that gave a dtype, the last.
    """

    enabled: bool = True
    dtype: Precision | None = None
    ops: Mapping[str, Entry] = field(default_factory=dict)
    because: tuple[tuple[str, str], ...] = ()

    def then(self, rule: ModuleRule | None, name: str, pattern: str) -> Inside:
        """What holds inside a module with this rule that is called where `self` holds."""
        if rule is None or rule.dtype is Precision.KEEP:
            return self
        named = rule.dtype in (Precision.FLOAT16, Precision.BFLOAT16)
        return Inside(
            self.enabled if rule.dtype is None else rule.dtype is not Precision.FP32,
            rule.dtype if named else self.dtype,
            {**self.ops, **rule.ops},
            (*self.because, (name, pattern)),
        )

    def in_16_bits(self, rule: ModuleRule | None, in_8_bits: Set[str]) -> ModuleRule | None:
        """A rule with what it means where products of matrices run in 8 bits: a 16-bit dtype ends that.

        Args:
            rule: the rule of a module that is called where `self` holds.
            in_8_bits: the operations with a float8 rule in the policy's own tables.
        """
        if rule is None or rule.dtype not in _IN_16_BITS:
            return rule
        around = {op for op in in_8_bits if op not in self.ops}
        around |= {op for op, entry in self.ops.items() if entry.rule in FLOAT8_RULES}
        ended = {op: Entry(Rule.LOWER) for op in sorted(around - rule.ops.keys())}
        if not ended:
            return rule
        return ModuleRule(rule.dtype, {**rule.ops, **ended}, rule.reason, rule.origin)

    @property
    def state(self) -> tuple[object, ...]:
        """All but the modules and patterns that made it so."""
        return self.enabled, self.dtype, {key: entry.rule for key, entry in self.ops.items()}

    @property
    def precision(self) -> str:
        """`fp32`, `float16`, `bfloat16`, or `lower` for the dtype of the region around the model."""
        return str(self.dtype or Precision.LOWER) if self.enabled else str(Precision.FP32)


Found = tuple[str, ModuleRule]
"""The pattern that decides for a module, and its rule."""

AROUND: Final = Inside()
"""What holds in the region around the model."""


def parse_module_rule(value: object, where: str, version: Version = _torch.VERSION) -> ModuleRule:
    """A rule from a dtype's name, or a mapping with `dtype`, `ops`, `reason`, or both of the first.

    Raises:
        PolicyError: anything else, with what is allowed.
    """
    if isinstance(value, ModuleRule):
        return value
    if not isinstance(value, Mapping):
        return _rule_of(value, {}, "", where)
    unknown = [key for key in value if not (isinstance(key, str) and key in _KEYS)]
    if unknown or not ("dtype" in value or "ops" in value):
        named = ", ".join(map(shown, unknown[:3]))
        problem = f"{named} is not allowed here" if unknown else "it says nothing"
        raise PolicyError(
            f'{where}: {problem}; write a dtype\'s name or {{ dtype = "bfloat16", ops = {{ softmax = "lower" }}, '
            'reason = "..." } with dtype, ops or both; a pattern with dots needs quotes, as in "encoder.**" = "fp32"'
        )
    rows = check_mapping(value.get("ops", {}), f"{where}: ops", 'ops = { softmax = "lower" }')
    ops = parse_rows(rows, f"{where} ops", version)
    reason = check_text(value.get("reason", ""), f"{where}: the reason")
    return _rule_of(value.get("dtype"), ops, reason, where, says_dtype="dtype" in value)


def parse_module_rules(
    rules: Mapping[Any, object], where: str, version: Version = _torch.VERSION
) -> dict[str, ModuleRule]:
    """Rules for modules by their patterns, each as `parse_module_rule` takes it.

    Raises:
        PolicyError: a pattern that cannot match any name, or what `parse_module_rule` raises.
    """
    return {
        check_pattern(pattern, where): parse_module_rule(rule, f"{where} {shown(pattern)}", version)
        for pattern, rule in rules.items()
    }


def decide(matching: Sequence[str], rules: Mapping[str, ModuleRule], name: str) -> Found | None:
    """The pattern that decides for a module, and its rule; None where none matches.

    Args:
        matching: the patterns that match its name, in the order of the rules.
        rules: what each pattern says.
        name: the module's.

    Raises:
        PolicyError: no exact rule, and two globs that say different things.
    """
    if not matching:
        return None
    exact = [pattern for pattern in matching if "*" not in pattern]
    first, *others = exact[:1] or matching
    for pattern in others:
        if not rules[pattern].says_as(rules[first]):
            raise PolicyError(
                f"[modules]: {shown(first)} says {rules[first]}, {shown(pattern)} says {rules[pattern]}, and both "
                f"match the module {shown(name)}. Add a rule for {shown(name)} itself, which decides, or make one of "
                "the patterns narrower."
            )
    return first, rules[first]


def _rule_of(
    said: object, ops: Mapping[str, Entry], reason: str, where: str, *, says_dtype: bool = True
) -> ModuleRule:
    """The rule for a dtype's name or a float8 rule's, which stands for that rule for all products of matrices."""
    if not says_dtype:
        return ModuleRule(None, ops, reason, where)
    if isinstance(said, str) and said in FLOAT8_RULES:
        products = {key: Entry(Rule(said), origin=where) for key in FLOAT8_OPERATIONS}
        return ModuleRule(None, {**products, **ops}, reason, where)
    what = " is not what a module can run in"
    choices = (*Precision, *FLOAT8_RULES)
    dtype = Precision(check_choice(said, choices, f"{where}: ", what, dtypes=_DTYPES))
    if ops and dtype in (Precision.FP32, Precision.KEEP):
        raise PolicyError(
            f"{where}: ops would never act with dtype {dtype.value!r}. For float32 in all but some operations, write "
            'dtype = "lower" and a rule for each operation.'
        )
    return ModuleRule(dtype, ops, reason, where)


def _precision(value: object, where: str) -> Precision:
    return Precision(
        check_choice(
            value, Precision, f"{where}: ", " is not what a module can run in", dtypes=_DTYPES
        )
    )
