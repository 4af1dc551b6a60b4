"""What a trace holds, as plain values: rows, totals, findings; to JSON and back.

Invariants:

- nothing here needs PyTorch: dtypes are text ("bfloat16"), times are seconds, sizes are bytes;
- what `as_dict` gives is strict JSON, and `from_dict` of it is equal to what it was made from;
- rows that describe the same thing are one row, with the sums of their numbers.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, TypeVar

from precast._internal.display import Card, Displayed, size
from precast.errors import PrecastError

__all__ = [
    "Cost",
    "Count",
    "Finding",
    "Flow",
    "Module",
    "Phase",
    "Row",
    "Totals",
    "Traced",
    "Where",
]

Phase = Literal["forward", "backward", "optimizer", "other"]
"""Where in a training step; "other" is outside of modules, backward and optimizers."""


@dataclass(slots=True)
class Row:
    """All that one operation did in one place with inputs of one kind."""

    module: str | None
    """The path of the module that it ran in, "" for the model itself; None outside of all."""
    op: str
    """The operation: as a policy spells it, without "aten::"."""
    phase: Phase
    source: str | None
    """The innermost line of the program, "train.py:12 in loss"; of the forward operation for one in backward."""
    inputs: list[str]
    """The dtypes of its tensors, in the order of the arguments."""
    output: list[str]
    """The dtypes of the tensors that it gave."""
    rule: str | None
    """The rule that held for it, None where none did."""
    reason: str
    """Why: the line of the policy, or why there was no rule."""
    region: str | None
    """Where the region around was opened; None outside of all."""
    module_rule: str | None
    """The rule for modules that held, "encoder.** = float16"."""
    device: str = "cpu"
    calls: int = 0
    casts: int = 0
    """Casts made for it; a cast that the program asked for itself is a row of its own, and counts there."""
    cast_bytes: int = 0
    """What these casts wrote, bytes."""
    cached: int = 0
    """Casts that the weight cache, or held weights, saved."""
    seconds: float = 0.0
    """Time in its kernels, casts included, as the host sees it."""
    cast_seconds: float = 0.0
    order: int = 0
    """Its place among all rows by the time of their first calls, the first is 0."""


@dataclass(frozen=True, slots=True)
class Step:
    """One operation on a tensor's way to its dtype."""

    op: str
    module: str | None
    source: str | None
    inputs: list[str]
    output: str
    rule: str | None
    reason: str

    def __str__(self) -> str:
        rule = "no rule" if self.rule is None else f"rule {self.rule}"
        where = "".join(
            f" {word} {text}" for word, text in (("in", self.module), ("at", self.source)) if text
        )
        return (
            f"{self.op} ({', '.join(self.inputs)} -> {self.output}){where}: {rule}, {self.reason}"
        )


@dataclass(frozen=True, slots=True, repr=False)
class Explanation(Displayed):
    """How a tensor came to have its dtype; as text, a line for each step."""

    dtype: str
    steps: list[Step]
    """The latest first; the last one is the rule, the cast or the first operation seen that decided."""

    def _card(self) -> Card:
        facts = [self.dtype, size(len(self.steps), "step") if self.steps else "not followed"]
        rows = [
            (s.op, s.module, s.source, ", ".join(s.inputs), s.output, s.rule, s.reason)
            for s in self.steps
        ]
        columns = ("operation", "module", "source", "inputs", "output", "rule", "reason")
        return Card("Explanation", facts, columns, rows)

    def __str__(self) -> str:
        if not self.steps:
            is_followed = "float" in self.dtype
            why = "it was not made while the trace saw everything"
            return f"{self.dtype}: {why if is_followed else 'only floating-point tensors are followed'}"
        return "\n".join([f"{self.dtype}, because of", *(f"  {step}" for step in self.steps)])


@dataclass(slots=True)
class Totals:
    """The sums over all that was traced, rows that were dropped included."""

    seconds: float = 0.0
    cast_seconds: float = 0.0
    casts: int = 0
    cast_bytes: int = 0
    cached: int = 0
    calls: int = 0
    steps: int = 0
    """How many steps of optimizers were traced."""


@dataclass(slots=True)
class Flow:
    """All casts from one dtype to another."""

    source: str
    target: str
    casts: int = 0
    bytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Module:
    """A module that was called."""

    name: str
    type: str


@dataclass(slots=True)
class Count:
    """How often one rule was carried out, in full trace and in counting mode."""

    op: str
    device: str
    rule: str
    calls: int = 0
    casts: int = 0


@dataclass(slots=True)
class Cost:
    """What a finding costs, in all that was traced; None where it is not known."""

    seconds: float | None = None
    bytes: int | None = None
    share: float | None = None
    """The part of the traced time, from 0 to 1."""


@dataclass(slots=True)
class Where:
    """The place that a finding is about."""

    module: str | None = None
    op: str | None = None
    source: str | None = None


@dataclass(slots=True)
class Finding:
    """Something that could be better, with its cost and the remedy."""

    kind: str
    """"round-trip", "float32-island", "weight-cast-again", "float32-op", "float32-spread"."""
    title: str
    cost: Cost
    suggestion: str
    policy: str | None
    """A whole policy file that mends it, to be saved and named as the policy; None where the remedy is none."""
    where: Where


@dataclass(slots=True)
class Traced:
    """All that a trace has to say."""

    rows: list[Row] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)
    flow: list[Flow] = field(default_factory=list)
    saved: dict[str, int] = field(default_factory=dict)
    """Dtype -> bytes that forward had made and that were there when backward began: of the pass with the most."""
    modules: list[Module] = field(default_factory=list)
    dropped: int = 0
    """Calls that have no row, as there were too many kinds; the totals have them."""
    findings: list[Finding] = field(default_factory=list)
    counts: list[Count] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What could not be seen, one sentence each."""

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        plain = dataclasses.asdict(self)
        plain["flow"] = [_renamed(flow, _IN_JSON) for flow in plain["flow"]]
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Traced:
        """What `as_dict` gave.

        Raises:
            PrecastError: something is missing, or of another type; the message says where.
        """
        flow = [_renamed(item, _FROM_JSON) for item in plain.get("flow", [])]
        return _read(cls, {**plain, "flow": flow}, "trace")


_IN_JSON = {"source": "from", "target": "to"}
_FROM_JSON = {"from": "source", "to": "target"}
_T = TypeVar("_T")


def _renamed(item: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in item.items()}


@cache
def _types(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _read(kind: Callable[..., _T], plain: Any, where: str) -> _T:
    """A dataclass from a mapping; what it does not know is left out, as later versions may say more."""
    if not isinstance(plain, Mapping):
        raise PrecastError(f"{where} is a {type(plain).__name__}; it must be an object")
    values = {}
    for item in dataclasses.fields(typing.cast(Any, kind)):
        required = item.default is item.default_factory is dataclasses.MISSING
        if item.name in plain:
            values[item.name] = _value(
                _types(kind)[item.name], plain[item.name], f"{where}.{item.name}"
            )
        elif required:
            raise PrecastError(f"{where} has no {item.name!r}: it is no trace of precast's")
    return kind(**values)


def _value(kind: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _read(typing.cast("type[Any]", kind), value, where)
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if origin is list and isinstance(value, list):
        return [_value(inside[0], item, f"{where}[{i}]") for i, item in enumerate(value)]
    if origin is dict and isinstance(value, Mapping):
        return {key: _value(inside[1], item, f"{where}.{key}") for key, item in value.items()}
    if origin is Literal:
        fits = value in inside
    else:
        allowed = inside if origin is types.UnionType else (kind,)
        fits = type(value) in allowed or (type(value) is int and float in allowed)
    if not fits:
        raise PrecastError(f"{where} is {value!r}; it must be of type {_name(kind)}")
    return value


def _name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("NoneType", "null")
