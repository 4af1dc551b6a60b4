"""What a document is evidence of: whether anything ran in 16 bits, what was traced, which steps were lost.

Invariants: what was not watched is "unknown", never "no".
"""

from __future__ import annotations

from typing import Literal

from precast.diagnostics.report.tree import seconds_by_dtype
from precast.diagnostics.report.words import count, plural
from precast.diagnostics.schema import Document, Totals

__all__ = [
    "dear_part",
    "elsewhere",
    "in_16_bits",
    "is_compiled",
    "is_mixed",
    "lost",
    "nonfinite_losses",
]
__all__ += ["of_steps", "on_casts", "part_of_casts", "ran_lower", "rules_ran", "was_traced"]

_DEAR = 0.3  # of the traced time: with so much for casts, float32 is worth a try
_LOWER = ("float16", "bfloat16", "float8", "complex32")


def lost(document: Document) -> int:
    """How many steps were skipped."""
    said = document.run.skipped
    return sum(step.skipped for step in document.steps) if said is None else said


def nonfinite_losses(document: Document) -> int:
    """In how many steps that were taken the loss was infinite or NaN."""
    return document.run.nonfinite_losses


def elsewhere(document: Document) -> int:
    """How many steps ended in threads that were not watched."""
    return document.run.elsewhere


def is_compiled(document: Document) -> bool:
    """Whether the process had functions of `torch.compile`, in which nothing is counted."""
    return document.run.compiled


def was_traced(document: Document) -> bool:
    """Whether the full trace saw an operation."""
    return bool(document.trace and document.trace.rows)


def rules_ran(document: Document, rule: str | None = None) -> int:
    """How many calls were made by a rule, of that name or of any."""
    return sum(each.calls for each in document.counts if rule in (None, each.rule))


def ran_lower(document: Document) -> Literal["yes", "no", "unknown"]:
    """Whether an operation ran in 16 bits or fewer.

    A cast that was made for the rule `lower` says so, and time that the trace saw there. Calls without a cast do not:
    the rule leaves float64 as it is.
    """
    rows = document.trace.rows if document.trace else []
    lower = [each for each in document.counts if each.rule == "lower"]
    if any(each.casts for each in lower) or _share(seconds_by_dtype(rows)):
        return "yes"
    steps = document.run.steps
    is_unseen = is_compiled(document) or (steps and elsewhere(document) == steps)
    if (lower and not rows) or (is_unseen and not document.counts):
        return "unknown"
    return "no"


def in_16_bits(document: Document) -> float:
    """The part of the traced time of operations in 16 bits or fewer; 0 where nothing was traced."""
    return _share(seconds_by_dtype(document.trace.rows)) if document.trace else 0.0


def on_casts(document: Document) -> float:
    """The part of the traced time spent on casts; 0 where nothing was traced."""
    return part_of_casts(document.trace.totals) if document.trace else 0.0


def part_of_casts(totals: Totals) -> float:
    """The part of the traced time spent on casts."""
    return totals.cast_seconds / totals.seconds if totals.seconds else 0.0


def is_mixed(document: Document) -> bool:
    """Whether rules of autocast gave 16 bits."""
    return ran_lower(document) == "yes" and rules_ran(document) > 0


def dear_part(document: Document) -> float:
    """The part of the time that casts took, where it is so much that float32 may be faster; else 0."""
    part = on_casts(document)
    return part if part >= _DEAR and is_mixed(document) else 0.0


def of_steps(document: Document, some: int) -> str:
    """Some of the steps of the run in words: "3 of 60 steps"."""
    return f"{count(some)} of {plural(document.run.steps, 'step')}"


def _share(dtypes: dict[str, float]) -> float:
    lower = sum(seconds for dtype, seconds in dtypes.items() if dtype.startswith(_LOWER))
    return lower / (sum(dtypes.values()) or 1.0)
