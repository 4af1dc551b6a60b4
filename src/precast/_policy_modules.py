"""A policy's rules for modules: patterns of names, what each says, and what follows where modules nest.

Invariants:
    - A name has components, between dots; the model's own name is "", which has none. `*` stands for any text
      within one component, `**` for any number of components, none included.
    - Of the rules that match a module an exact one decides; globs that say different things are an error.
    - What holds inside a module follows from its rule and from what holds around it, and from nothing else.
    - Every problem is a `PolicyError` that begins with where it was found.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from precast import _torch
from precast._policy_rows import Entry, canonical, check_row, nearest, parse_entry
from precast._versions import Version
from precast.errors import PolicyError

__all__ = [
    "AROUND",
    "Inside",
    "ModuleRule",
    "Precision",
    "check_pattern",
    "find",
    "is_glob",
    "matches",
    "parse_module_rule",
    "prefixes",
]


class Precision(enum.StrEnum):
    """What a rule says of a module's inputs and of the region inside it."""

    FP32 = "fp32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    LOWER = "lower"
    KEEP = "keep"


_KEYS: Final = ("dtype", "ops", "reason")
_SPELLING: Final = ", ".join(Precision)


@dataclass(frozen=True)
class ModuleRule:
    """What holds for a module and all that it calls.

    Attributes:
        dtype: `fp32`: inputs are cast to float32, and autocast is off inside; `float16`, `bfloat16`: inputs are cast
            to it, and it is the dtype of the region inside; `lower`: the same with the dtype of the region around,
            also where an outer module has switched autocast off; `keep`: as if no rule matched; None: as around it.
        ops: rows laid over the policy in force inside, by the operation's key; for every device type.
        reason: why, in a few words.
        origin: the file and key that said so; no part of the value.
    """

    dtype: Precision | None
    ops: Mapping[str, Entry] = field(default_factory=dict)
    reason: str = ""
    origin: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ops", MappingProxyType(dict(self.ops)))

    def __hash__(self) -> int:
        return hash((self.dtype, self.reason, frozenset(self.ops)))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.dtype, dict(self.ops), self.reason, self.origin)

    def __str__(self) -> str:
        ops = ", ".join(f"{key.removeprefix('aten::')} = {e.rule}" for key, e in self.ops.items())
        return " with ".join([*([self.dtype] if self.dtype else []), *([ops] if ops else [])])

    def says_as(self, other: ModuleRule) -> bool:
        """Whether both mean the same; reasons may differ."""
        return self._meaning == other._meaning

    @property
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

    @property
    def state(self) -> tuple[object, ...]:
        """All but who made it so."""
        return self.enabled, self.dtype, {key: entry.rule for key, entry in self.ops.items()}

    @property
    def precision(self) -> str:
        """`fp32`, `float16`, `bfloat16`, or `lower` for the dtype of the region around the model."""
        return str(self.dtype or Precision.LOWER) if self.enabled else str(Precision.FP32)


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
        return ModuleRule(_precision(value, where), origin=where)
    unknown = [repr(key) for key in value if key not in _KEYS]
    if unknown or not value.keys() & {"dtype", "ops"}:
        problem = f"{', '.join(unknown)} is not allowed here" if unknown else "it says nothing"
        raise PolicyError(
            f'{where}: {problem}; write a dtype\'s name or {{ dtype = "bfloat16", ops = {{ softmax = "lower" }}, '
            'reason = "..." } with dtype, ops or both; a pattern with dots needs quotes, as in "encoder.**" = "fp32"'
        )
    dtype = _precision(value["dtype"], where) if "dtype" in value else None
    ops = _ops(value.get("ops", {}), where, version)
    if ops and dtype in (Precision.FP32, Precision.KEEP):
        raise PolicyError(
            f"{where}: ops would never act with dtype {dtype.value!r}. For float32 in all but some operations, write "
            'dtype = "lower" and a rule for each operation.'
        )
    reason = value.get("reason", "")
    if not isinstance(reason, str):
        raise PolicyError(f"{where}: the reason is {reason!r}; it must be text")
    return ModuleRule(dtype, ops, reason, where)


def check_pattern(pattern: object, where: str) -> str:
    """`pattern`, if it can match the name of a module.

    Raises:
        PolicyError: it cannot, or means something else than it seems to.
    """
    advice = 'Write names with dots, as in "decoder.0.attn"; * for part of a component, ** for any number of them.'
    if not isinstance(pattern, str):
        raise PolicyError(f"{where}: {pattern!r} is not the name of a module. {advice}")
    if pattern == "":
        return pattern
    for component in pattern.split("."):
        if component == "":
            problem = "has an empty component"
        elif "**" in component and component != "**":
            problem = f"has ** beside other text in the component {component!r}"
        elif set(component) & set("?[]"):
            problem = (
                "has one of ? [ ], which names of modules do not have and patterns do not know"
            )
        else:
            continue
        raise PolicyError(f"{where}: the pattern {pattern!r} {problem}. {advice}")
    return pattern


def is_glob(pattern: str) -> bool:
    """Whether a pattern is more than one name."""
    return "*" in pattern


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern matches the name of a module.

    >>> matches("*.lm_head", "model.lm_head"), matches("*.lm_head", "lm_head")
    (True, False)
    >>> matches("encoder.**", "encoder"), matches("encoder.**", "encoder.layer.0")
    (True, True)
    """
    return _regex(pattern).fullmatch(name + "." if name else "") is not None


def find(rules: Mapping[str, ModuleRule], name: str) -> tuple[str, ModuleRule] | None:
    """The pattern that decides for a module, and its rule; None where none matches.

    Raises:
        PolicyError: no exact rule, and two globs that say different things.
    """
    exact = rules.get(name)
    if exact is not None and not is_glob(name):
        return name, exact
    found = [item for item in rules.items() if is_glob(item[0]) and matches(item[0], name)]
    for pattern, rule in found[1:]:
        if not rule.says_as(found[0][1]):
            first, says = found[0]
            raise PolicyError(
                f"[modules]: {first!r} says {says}, {pattern!r} says {rule}, and both match the module {name!r}. "
                f"Add a rule for {name!r} itself, which decides, or make one of the patterns narrower."
            )
    return found[0] if found else None


def prefixes(name: str) -> Iterator[str]:
    """The modules that a module is in, the model first, and itself."""
    yield ""
    components = name.split(".") if name else []
    for count in range(len(components)):
        yield ".".join(components[: count + 1])


@functools.cache
def _regex(pattern: str) -> re.Pattern[str]:
    """Matches a name of which every component is followed by a dot, so that a name without one is no special case."""
    parts = []
    for component in pattern.split(".") if pattern else ():
        if component == "**":
            parts.append(r"(?:[^.]+\.)*")
        else:
            parts.append(r"[^.]*".join(map(re.escape, component.split("*"))) + r"\.")
    return re.compile("".join(parts), re.DOTALL)


def _precision(value: object, where: str) -> Precision:
    try:
        return Precision(value)  # type: ignore[arg-type]
    except ValueError:
        hint = nearest(str(value), list(Precision))
        raise PolicyError(
            f"{where}: {value!r} is not what a module can run in{hint} Allowed: {_SPELLING}"
        ) from None


def _ops(table: object, where: str, version: Version) -> dict[str, Entry]:
    if not isinstance(table, Mapping):
        raise PolicyError(f'{where}: ops is {table!r}; write ops = {{ softmax = "lower" }}')
    rows: dict[str, Entry] = {}
    for name, value in table.items():
        here = f"{where} ops {name}"
        key = canonical(name, here)
        entry = parse_entry(value, here)
        if entry.is_for(version):
            check_row(key, entry, here)
            rows[key] = entry
    return rows
