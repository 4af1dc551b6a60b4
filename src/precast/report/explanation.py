"""The operations that led to the dtype of a tensor, as plain values.

Invariants: nothing here needs PyTorch; dtypes are text ("bfloat16").
"""

from __future__ import annotations

from dataclasses import dataclass

from precast._internal.display import Card, Displayed, size

__all__ = ["Explanation", "LineageStep"]


@dataclass(frozen=True, slots=True)
class LineageStep:
    """One of the operations that led to a tensor's dtype."""

    op: str
    module: str | None
    source: str | None
    inputs: list[str]
    output: str
    rule: str | None
    reason: str

    def __str__(self) -> str:
        rule = "no rule" if self.rule is None else f"rule {self.rule}"
        where = f" in {self.module}" if self.module else ""
        where += f" at {self.source}" if self.source else ""
        dtypes = f"{', '.join(self.inputs)} -> {self.output}"
        return f"{self.op} ({dtypes}){where}: {rule}, {self.reason}"


@dataclass(frozen=True, slots=True, repr=False)
class Explanation(Displayed):
    """The derivation of a tensor's dtype; as text, a line for each step."""

    dtype: str
    steps: list[LineageStep]
    """The latest step first. The last one decided: a rule, a cast, or the first recorded operation."""

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
            why = "it was not created while the full trace was open"
            return f"{self.dtype}: {why if is_followed else 'only floating-point tensors are followed'}"
        return "\n".join([f"{self.dtype}, because of", *(f"  {step}" for step in self.steps)])
