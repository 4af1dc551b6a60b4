"""The part of a run's data that is about its numbers: ranges, histograms, and what was not finite first.

Invariants: as in `precast.diagnostics.schema`, which has the rest of the data.
"""

# ruff: noqa: RUF009 -- `may_be_missing` is `dataclasses.field`

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from precast.diagnostics.records import may_be_missing

__all__ = ["BrokenState", "Health", "HealthModule", "Histogram"]
__all__ += ["NonfiniteOrigin", "Range", "Shares", "WhatIf"]


@dataclass(slots=True)
class Range:
    """The numbers of one tensor that went into the first module to fail."""

    dtype: str
    """Its dtype."""
    maximum: float | None
    """The largest; null where some were not finite."""
    minimum: float | None
    """The smallest; null where some were not finite."""
    rms: float | None
    """The root of the mean square; null where it was not computed."""
    nonfinite: int
    """0, or 1 if some were not finite: they are not counted."""
    of: str | None = may_be_missing(is_left_out=True)
    """Where the tensor came from."""


@dataclass(slots=True)
class BrokenState:
    """A parameter or buffer that was not finite before the step began."""

    name: str
    """Its name in the model."""
    kind: Literal["parameter", "buffer"]
    """A parameter or a buffer."""
    dtype: str
    """Its dtype."""
    optimizer: str | None
    """The class of the optimizer that trains it."""
    eps: float | None
    """The eps of that optimizer, if it is zero in that dtype."""


@dataclass(slots=True)
class NonfiniteOrigin:
    """The first tensor that was not finite in a step."""

    step: int
    """The number of the step."""
    kind: Literal["output", "input", "gradient", "parameter"]
    """A module's output, an input of one that no module made, the gradient of an output, or of a parameter."""
    name: str
    """The module's or the parameter's, as the model names it."""
    what: Literal["inf", "nan"]
    """Whether it was infinite or NaN."""
    inputs: list[Range]
    """What it was made from."""
    message: str
    """All this in a sentence."""
    state: BrokenState | None = may_be_missing(is_left_out=True)
    """The parameter or buffer of the module that was not finite before."""


@dataclass(slots=True)
class Histogram:
    """Counts of binary exponents."""

    low: int
    """The lowest exponent that is counted."""
    counts: list[list[int]]
    """`counts[step][k]` numbers had the exponent `low + k`."""


@dataclass(slots=True)
class Shares:
    """Which shares of the numbers a format would lose."""

    underflow: float
    """The share that would become zero."""
    overflow: float
    """The share that would become infinite."""


@dataclass(slots=True)
class WhatIf:
    """What another format would make of a tensor in all its steps, as it is and with the best power of two as scale."""

    underflow: float
    """The share of numbers that would become zero."""
    overflow: float
    """The share that would become infinite."""
    subnormal: float
    """The share that would be kept with fewer digits."""
    best_scale: float | None
    """The power of two that loses least."""
    with_best: Shares | None
    """What would be lost with it."""
    error: float | None = may_be_missing()
    """The relative error of rounding, each tensor scaled so that it just fits, as the float8 rules scale."""


@dataclass(slots=True)
class HealthModule:
    """One tensor that was watched; every list has an entry for each step of `steps`."""

    name: str
    """The module's or the parameter's, as the model names it."""
    kind: Literal["output", "gradient", "parameter"]
    """A module's output, the gradient of one, or a parameter's gradient."""
    steps: list[int]
    """The steps that were counted."""
    histogram: Histogram
    """The exponents."""
    zeros: list[int]
    """How many numbers were zero."""
    underflow_zeros: list[int | None]
    """How many of these underflow made; where that is not known it is null, or `underflow_known` is false."""
    subnormal: list[int]
    """How many were below the format's smallest normal number."""
    overflow: list[int]
    """How many were infinite."""
    saturated: list[int]
    """How many were the format's largest number."""
    nan: list[int]
    """How many were NaN."""
    maximum: list[float | None]
    """The largest magnitude of the finite numbers, null where there is none."""
    rms: list[float | None]
    """The root of their mean square, null where there is none."""
    elements: list[int]
    """How many numbers there were."""
    what_if: dict[str, WhatIf]
    """What other formats would make of them."""
    underflow_known: list[bool] | None = may_be_missing(is_left_out=True)
    """Whether it is known how many zeros underflow made."""
    updates_rounded_away: list[float | None] | None = may_be_missing(is_left_out=True)
    """Of a parameter: the share of its numbers that the step was to move, and that stayed as 16 bits round; null where
    that is not known."""
    updates_lost: list[float | None] | None = may_be_missing(is_left_out=True)
    """The share of these in the size of the update."""
    updates_rounded_away_with_kahan: list[float | None] | None = may_be_missing(is_left_out=True)
    """The share of numbers that would have stayed with `precast.optim.bfloat16_weights`."""
    states_rounded_away: list[dict[str, float]] | None = may_be_missing(is_left_out=True)
    """Of a parameter: by each optimizer state in 16 bits, the share of its values that the step was to change, and that
    stayed."""
    average_rounded_away: list[float | None] | None = may_be_missing(is_left_out=True)
    """Of an average of the parameter that is stored in 16 bits: the share of its values that differ from the parameter
    and that an update left as they were; null where no such average was written."""


@dataclass(slots=True)
class Health:
    """Numeric health: what a monitor saw of the model's numbers."""

    format: str
    """The dtype that the run computed in."""
    modules: list[HealthModule]
    """What was counted."""
    first: NonfiniteOrigin | None
    """The first tensor of the run that was not finite."""
    ring: list[dict[str, Any]]
    """The latest steps: as `Step`, with the tensors that came nearest to the end of their type as "worst"."""
    every: int | None = may_be_missing(is_left_out=True)
    """The number of steps from one count of the numbers to the next."""
    steps: int | None = may_be_missing(is_left_out=True)
    """How many steps were watched."""
    notes: list[str] | None = may_be_missing(is_left_out=True)
    """What the monitor could not look at, one sentence each."""
    low_modules: list[str] | None = may_be_missing(is_left_out=True)
    """The modules that have parameters in 16 bits."""
