"""Facts that follow from a document: use of 16 bits, traced operations, skipped steps.

Invariant: a fact that was not watched is "unknown", never "no".
"""

from __future__ import annotations

from typing import Literal

from precast._internal.display import plural
from precast.report.schema import OperationRow, RunDocument, TraceTotals
from precast.report.tree import ran_in, seconds_by_dtype
from precast.report.words import count

__all__ = ["expensive_casts", "in_16_bits", "is_mixed", "lost", "of_steps", "on_casts", "ran_lower"]
__all__ += ["rows_of", "rules_ran", "slow_dtypes", "steps_counted"]

_SLOW = 0.8  # times float32's speed: slower than the spread of the measurement explains
_EXPENSIVE = 0.3  # of the traced time: with so much for casts, float32 is worth a try
_LOWER = ("float16", "bfloat16", "float8", "complex32")


def rows_of(document: RunDocument) -> list[OperationRow]:
    """Return the rows of the trace; empty without a trace."""
    return document.trace.rows if document.trace else []


def steps_counted(document: RunDocument) -> int:
    """Return the number of steps in which values were examined."""
    modules = document.health.modules if document.health else []
    return len({step for module in modules for step in module.steps})


def lost(document: RunDocument) -> int:
    """Return the number of skipped steps."""
    skipped = document.run.skipped
    return sum(step.skipped for step in document.steps) if skipped is None else skipped


def rules_ran(document: RunDocument, rule: str | None = None) -> int:
    """Return the number of calls under a rule, or under any rule."""
    return sum(each.calls for each in document.counts if rule in (None, each.rule))


def ran_lower(document: RunDocument) -> Literal["yes", "no", "unknown"]:
    """Return "yes" if an operation ran in 16 bits or fewer.

    Casts to 16 bits and traced time in 16 bits prove it. Calls without a cast do not, because the rule does
    not change float64.
    """
    rules = "lower", "lower_out_fp32"
    run, lower = document.run, [each for each in document.counts if each.rule in rules]
    if any(each.casts for each in lower) or in_16_bits(document):
        return "yes"
    is_unseen = run.compiled or (run.steps and run.elsewhere == run.steps)
    if (lower and not rows_of(document)) or (is_unseen and not document.counts):
        return "unknown"
    return "no"


def slow_dtypes(document: RunDocument) -> list[str]:
    """Return the 16-bit dtypes that rules used on the CPU and that are slower there than float32."""
    used = {
        ran_in(row) for row in rows_of(document) if row.rule == "lower" and row.device_type == "cpu"
    }
    return [d for d, ratio in document.run.speeds.items() if d in used and ratio < _SLOW]


def in_16_bits(document: RunDocument) -> float:
    """Return the share of the traced time of operations in 16 bits or fewer; 0 without a trace."""
    dtypes = seconds_by_dtype(rows_of(document))
    lower = sum(seconds for dtype, seconds in dtypes.items() if dtype.startswith(_LOWER))
    return lower / (sum(dtypes.values()) or 1.0)


def on_casts(document: RunDocument) -> float:
    """Return the share of the traced time spent on casts; 0 without a trace."""
    totals = document.trace.totals if document.trace else TraceTotals()
    return totals.cast_seconds / totals.seconds if totals.seconds else 0.0


def is_mixed(document: RunDocument) -> bool:
    """Return True if rules of autocast gave 16 bits."""
    return ran_lower(document) == "yes" and rules_ran(document) > 0


def expensive_casts(document: RunDocument) -> float:
    """Return the share of the time spent on casts if it is so large that float32 may be faster; else 0."""
    part = on_casts(document)
    return part if part >= _EXPENSIVE and is_mixed(document) else 0.0


def of_steps(document: RunDocument, some: int) -> str:
    """Return a number of the run's steps in words: "3 of 60 steps"."""
    return f"{count(some)} of {plural(document.run.steps, 'step')}"
