"""What a document is evidence of: whether anything ran in 16 bits, what was traced, which steps were lost.

Invariant: what was not watched is "unknown", never "no".
"""

from __future__ import annotations

from typing import Literal

from precast.diagnostics.report.tree import ran_in, seconds_by_dtype
from precast.diagnostics.report.words import count, plural
from precast.diagnostics.schema import Document, Row, Totals

__all__ = ["expensive_casts", "in_16_bits", "is_mixed", "lost", "of_steps", "on_casts", "ran_lower"]
__all__ += ["rows_of", "rules_ran", "slow_dtypes", "steps_counted"]

_SLOW = 0.8  # times float32's speed: slower than the spread of the measurement explains
_EXPENSIVE = 0.3  # of the traced time: with so much for casts, float32 is worth a try
_LOWER = ("float16", "bfloat16", "float8", "complex32")


def rows_of(document: Document) -> list[Row]:
    """The rows of the trace; none where nothing was traced."""
    return document.trace.rows if document.trace else []


def steps_counted(document: Document) -> int:
    """The number of steps in which the numbers were examined."""
    modules = document.health.modules if document.health else []
    return len({step for module in modules for step in module.steps})


def lost(document: Document) -> int:
    """How many steps were skipped."""
    said = document.run.skipped
    return sum(step.skipped for step in document.steps) if said is None else said


def rules_ran(document: Document, rule: str | None = None) -> int:
    """How many calls were made by a rule of that name, or by any rule."""
    return sum(each.calls for each in document.counts if rule in (None, each.rule))


def ran_lower(document: Document) -> Literal["yes", "no", "unknown"]:
    """Whether an operation ran in 16 bits or fewer.

    A cast that was made for the rule `lower` says so, and so does traced time in 16 bits. Calls without a cast do not:
    the rule leaves float64 as it is.
    """
    run, lower = document.run, [each for each in document.counts if each.rule == "lower"]
    if any(each.casts for each in lower) or in_16_bits(document):
        return "yes"
    is_unseen = run.compiled or (run.steps and run.elsewhere == run.steps)
    if (lower and not rows_of(document)) or (is_unseen and not document.counts):
        return "unknown"
    return "no"


def slow_dtypes(document: Document) -> list[str]:
    """Return the 16-bit dtypes that rules used on the CPU, and in which it is slower than in float32."""
    used = {ran_in(row) for row in rows_of(document) if row.rule == "lower" and row.device == "cpu"}
    return [d for d, ratio in document.run.speeds.items() if d in used and ratio < _SLOW]


def in_16_bits(document: Document) -> float:
    """The part of the traced time of operations in 16 bits or fewer; 0 where nothing was traced."""
    dtypes = seconds_by_dtype(rows_of(document))
    lower = sum(seconds for dtype, seconds in dtypes.items() if dtype.startswith(_LOWER))
    return lower / (sum(dtypes.values()) or 1.0)


def on_casts(document: Document) -> float:
    """The part of the traced time spent on casts; 0 where nothing was traced."""
    totals = document.trace.totals if document.trace else Totals()
    return totals.cast_seconds / totals.seconds if totals.seconds else 0.0


def is_mixed(document: Document) -> bool:
    """Whether rules of autocast gave 16 bits."""
    return ran_lower(document) == "yes" and rules_ran(document) > 0


def expensive_casts(document: Document) -> float:
    """The part of the time that casts took, where it is so much that float32 may be faster; else 0."""
    part = on_casts(document)
    return part if part >= _EXPENSIVE and is_mixed(document) else 0.0


def of_steps(document: Document, some: int) -> str:
    """Some of the steps of the run in words: "3 of 60 steps"."""
    return f"{count(some)} of {plural(document.run.steps, 'step')}"
