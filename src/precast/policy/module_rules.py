"""A policy's rules for modules: their meaning, the choice among matching rules, and the effect of nested ones.

Invariants:
    - Among the rules that match a module an exact name decides; patterns with stars that disagree are an error.
    - The state inside a module depends on its rule and on the state outside of it, and on nothing else.
    - Every problem is a `PolicyError` that begins with its location.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from precast import _torch
from precast._internal import cures
from precast._internal.torch_versions import Version
from precast.errors import PolicyError
from precast.policy.patterns import check_pattern
from precast.policy.rows import PRODUCT_OPERATIONS, Entry, Rule, canonical, parse_entry, parse_rows
from precast.policy.values import check_choice, check_mapping, check_text, shown

__all__ = [
    "MODEL_CONTEXT",
    "Decision",
    "ModuleContext",
    "ModuleRule",
    "Precision",
    "decide",
    "parse_module_rule",
    "parse_module_rules",
]


class Precision(enum.StrEnum):
    """The effect of a rule on a module's inputs and on the region inside the module."""

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
    """The rule for a module and everything that it calls.

    The name of a rule for products in place of the dtype is short for a row with that rule for each product.

    Attributes:
        dtype: `fp32`: inputs are cast to float32, and autocast is off inside. `float16`, `bfloat16`: inputs are cast
            to it, and it is the dtype of the region inside. `lower`: the same with the dtype of the surrounding region,
            even if an outer module has switched autocast off. With each of these three, a rule for products that holds
            outside the module is replaced by `lower` inside, unless `ops` says otherwise. `keep`: as if no rule
            matched. None: as outside.
        ops: rows that replace those of the policy in force inside, by the operation's key; for every device type.
        reason: the reason, in a few words.
        origin: the file and key of the rule; ignored when rules are compared.
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
        short = self.product_rule
        products = PRODUCT_OPERATIONS[short] if short else ()
        rows = {k: e for k, e in self.ops.items() if k not in products}
        ops = ", ".join(f"{key.removeprefix('aten::')} = {e.rule}" for key, e in rows.items())
        dtype = self.dtype or short
        return " with ".join([*([dtype] if dtype else []), *([ops] if ops else [])])

    @property
    def product_rule(self) -> Rule | None:
        """The rule for products that all of them have; None if they differ or have none, or there is a dtype."""
        if self.dtype is not None:
            return None
        for rule, operations in PRODUCT_OPERATIONS.items():
            entries = map(self.ops.get, operations)
            if all(entry is not None and entry.rule is rule for entry in entries):
                return rule
        return None

    def agrees_with(self, other: ModuleRule) -> bool:
        """Return True if both have the same effect; reasons may differ."""
        return self._meaning == other._meaning

    @functools.cached_property
    def _meaning(self) -> tuple[object, ...]:
        return self.dtype, {key: entry.rule for key, entry in self.ops.items()}


@dataclass(frozen=True)
class ModuleContext:
    """The state inside a module when the model is called in a region with autocast on.

    Attributes:
        enabled: True if autocast is on.
        dtype: `float16` or `bfloat16`; None is the dtype of the region that the model is called in.
        ops: rows that replace those of its policy.
        sources: the modules and patterns with an effect on the state, outermost first; of those with a dtype, the last.
    """

    enabled: bool = True
    dtype: Precision | None = None
    ops: Mapping[str, Entry] = field(default_factory=dict)
    sources: tuple[tuple[str, str], ...] = ()

    def then(self, rule: ModuleRule | None, name: str, pattern: str) -> ModuleContext:
        """Return the state inside a module with this rule that is called in the state `self`."""
        if rule is None or rule.dtype is Precision.KEEP:
            return self
        has_dtype = rule.dtype in (Precision.FLOAT16, Precision.BFLOAT16)
        return ModuleContext(
            self.enabled if rule.dtype is None else rule.dtype is not Precision.FP32,
            rule.dtype if has_dtype else self.dtype,
            {**self.ops, **rule.ops},
            (*self.sources, (name, pattern)),
        )

    def with_products(self, rule: ModuleRule | None, special: Set[str]) -> ModuleRule | None:
        """Return a rule with its effect on rules for products made explicit: a 16-bit dtype ends them."""
        if rule is None or rule.dtype not in _IN_16_BITS:
            return rule
        outside = {op for op in special if op not in self.ops}
        outside |= {op for op, entry in self.ops.items() if entry.rule in PRODUCT_OPERATIONS}
        lowered = {op: Entry(Rule.LOWER) for op in sorted(outside - rule.ops.keys())}
        if not lowered:
            return rule
        return ModuleRule(rule.dtype, {**rule.ops, **lowered}, rule.reason, rule.origin)

    @property
    def state(self) -> tuple[object, ...]:
        """The state without its sources, for comparison."""
        return self.enabled, self.dtype, {key: entry.rule for key, entry in self.ops.items()}

    @property
    def precision(self) -> str:
        """`fp32`, `float16`, `bfloat16`, or `lower` for the dtype of the region around the model."""
        return str(self.dtype or Precision.LOWER) if self.enabled else str(Precision.FP32)


Decision = tuple[str, ModuleRule]
"""The pattern that decides for a module, and its rule."""

MODEL_CONTEXT: Final = ModuleContext()
"""The state in the region that the model is called in."""


def parse_module_rule(value: object, where: str, version: Version = _torch.VERSION) -> ModuleRule:
    """Return a rule for the name of a dtype, or for a mapping with `dtype` or `ops` or both, and `reason`."""
    if isinstance(value, ModuleRule):
        return value
    if not isinstance(value, Mapping):
        return _rule_of(value, {}, "", where)
    unknown = [key for key in value if not (isinstance(key, str) and key in _KEYS)]
    if unknown or not ("dtype" in value or "ops" in value):
        names = ", ".join(map(shown, unknown[:3]))
        problem = f"{names} is not allowed here" if unknown else "it has neither dtype nor ops"
        raise PolicyError(
            f'{where}: {problem}; write a dtype\'s name or {{ dtype = "bfloat16", ops = {{ softmax = "lower" }}, '
            'reason = "..." } with dtype, ops or both; a pattern with dots needs quotes, as in "encoder.**" = "fp32"'
        )
    rows = check_mapping(value.get("ops", {}), f"{where}: ops", 'ops = { softmax = "lower" }')
    ops = parse_rows(rows, f"{where} ops", version)
    reason = check_text(value.get("reason", ""), f"{where}: the reason")
    return _rule_of(value.get("dtype"), ops, reason, where, has_dtype="dtype" in value)


def parse_module_rules(
    rules: Mapping[Any, object], where: str, version: Version = _torch.VERSION
) -> dict[str, ModuleRule]:
    """Return rules for modules by their patterns; `parse_module_rule` describes the values."""
    return {
        check_pattern(pattern, where): parse_module_rule(rule, f"{where} {shown(pattern)}", version)
        for pattern, rule in rules.items()
    }


def decide(matching: Sequence[str], rules: Mapping[str, ModuleRule], name: str) -> Decision | None:
    """Return the pattern that decides for a module, and its rule; None if none matches.

    Raises:
        PolicyError: no exact rule, and two patterns with different rules.
    """
    if not matching:
        return None
    exact = [pattern for pattern in matching if "*" not in pattern]
    first, *others = exact[:1] or matching
    for pattern in others:
        if not rules[pattern].agrees_with(rules[first]):
            raise PolicyError(
                f"[modules]: {shown(first)} says {rules[first]}, {shown(pattern)} says {rules[pattern]}, and both "
                f"match the module {shown(name)}. {cures.EXACT_RULE(name=shown(name))}"
            )
    return first, rules[first]


def _rule_of(
    dtype_name: object, ops: Mapping[str, Entry], reason: str, where: str, *, has_dtype: bool = True
) -> ModuleRule:
    """Return the rule for the name of a dtype, or of a rule for products, which applies to all of them."""
    if not has_dtype:
        return ModuleRule(None, ops, reason, where)
    if isinstance(dtype_name, str) and dtype_name in PRODUCT_OPERATIONS:
        product = Rule(dtype_name)
        products = {key: Entry(product, origin=where) for key in PRODUCT_OPERATIONS[product]}
        return ModuleRule(None, {**products, **ops}, reason, where)
    dtype = _precision(dtype_name, where, (*Precision, *PRODUCT_OPERATIONS))
    if ops and dtype in (Precision.FP32, Precision.KEEP):
        raise PolicyError(
            f"{where}: ops would never act with dtype {dtype.value!r}. For float32 in all but some operations, write "
            'dtype = "lower" and a rule for each operation.'
        )
    return ModuleRule(dtype, ops, reason, where)


def _precision(value: object, where: str, choices: Sequence[str] = tuple(Precision)) -> Precision:
    problem = " is not a precision of a module"
    return Precision(check_choice(value, choices, f"{where}: ", problem, dtypes=_DTYPES))
