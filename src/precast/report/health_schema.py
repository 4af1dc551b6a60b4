"""The data of a monitor: histograms, counts, and the first tensor that was not finite.

Invariants: those of `precast.report.schema`, which has the rest of a run's data.
"""

# ruff: noqa: RUF009 -- `may_be_missing` is `dataclasses.field`

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from precast._internal.events import NonfiniteOrigin
from precast._internal.records import may_be_missing

__all__ = ["FormatLoss", "Health", "HealthModule", "Histogram", "LossShares"]


@dataclass(slots=True)
class Histogram:
    """Counts of binary exponents."""

    low: int
    """The lowest exponent that is counted."""
    counts: list[list[int]]
    """`counts[step][k]` values had the exponent `low + k`."""


@dataclass(slots=True)
class LossShares:
    """The shares of the values that a format would lose."""

    underflow: float
    """The share that would become zero."""
    overflow: float
    """The share that would become infinite."""


@dataclass(slots=True)
class FormatLoss:
    """The loss of a tensor's values in another format, without a scale and with the best power of two."""

    underflow: float
    """The share of values that would become zero."""
    overflow: float
    """The share that would become infinite."""
    subnormal: float
    """The share that would have fewer digits."""
    best_scale: float | None
    """The power of two with the smallest loss."""
    with_best: LossShares | None
    """The loss with that scale."""
    error: float | None = may_be_missing()
    """The relative error of rounding, each tensor scaled so that it just fits, as the float8 rules scale."""


@dataclass(slots=True)
class HealthModule:
    """One watched tensor; every list has an entry for each step of `steps`."""

    name: str
    """The name of the module or parameter in the model."""
    kind: Literal["output", "gradient", "parameter"]
    """A module's output, the gradient of one, or a parameter's gradient."""
    steps: list[int]
    """The counted steps."""
    histogram: Histogram
    """The exponents."""
    zeros: list[int]
    """The number of zeros."""
    underflow_zeros: list[int | None]
    """The number of zeros caused by underflow; if unknown it is null, or `underflow_known` is false."""
    subnormal: list[int]
    """The number of values below the format's smallest normal value."""
    overflow: list[int]
    """The number of infinite values."""
    saturated: list[int]
    """The number of values equal to the format's largest value."""
    nan: list[int]
    """The number of NaNs."""
    maximum: list[float | None]
    """The largest magnitude of the finite values, null without any."""
    rms: list[float | None]
    """The root mean square of the finite values, null without any."""
    elements: list[int]
    """The number of values."""
    what_if: dict[str, FormatLoss]
    """The loss in other formats."""
    underflow_known: list[bool] | None = may_be_missing(is_left_out=True)
    """True if the number of zeros caused by underflow is known."""
    updates_rounded_away: list[float | None] | None = may_be_missing(is_left_out=True)
    """For a parameter, the share of its values that the step should change and that stayed; null if unknown."""
    updates_lost: list[float | None] | None = may_be_missing(is_left_out=True)
    """The share of the update's size that falls on these values."""
    updates_rounded_away_with_kahan: list[float | None] | None = may_be_missing(is_left_out=True)
    """The share of values that would have stayed with `precast.optim.bfloat16_weights`."""
    states_rounded_away: list[dict[str, float]] | None = may_be_missing(is_left_out=True)
    """For a parameter, and for each of its optimizer states in 16 bits, the share of values that the step should change
    and that stayed."""
    average_rounded_away: list[float | None] | None = may_be_missing(is_left_out=True)
    """For a 16-bit average of a parameter, the share of values that differ from the parameter and that an update did
    not change; null if no such average was written."""


@dataclass(slots=True)
class Health:
    """The results of a monitor."""

    format: str
    """The narrowest dtype of the watched tensors."""
    modules: list[HealthModule]
    """The watched tensors."""
    first: NonfiniteOrigin | None
    """The first tensor of the run that was not finite."""
    ring: list[dict[str, Any]]
    """The latest steps: as `StepData`, with the tensors nearest to the limit of their format as "worst"."""
    every: int | None = may_be_missing(is_left_out=True)
    """The number of steps from one count of the values to the next."""
    steps: int | None = may_be_missing(is_left_out=True)
    """The number of watched steps."""
    notes: list[str] | None = may_be_missing(is_left_out=True)
    """The limits of the monitor, one sentence each."""
    low_modules: list[str] | None = may_be_missing(is_left_out=True)
    """The modules that have parameters in 16 bits."""
