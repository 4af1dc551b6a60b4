"""The reason of each row of a tuned policy, with the figures that decided.

Invariant: every figure was measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from precast._internal.display import dtype_name, milliseconds, plural
from precast.tuning.chooser import Chosen
from precast.tuning.costs import Objective, ProgramCosts
from precast.tuning.error_meter import PrecisionErrors
from precast.tuning.policy_rows import PolicyRow
from precast.tuning.sensitivity import Sensitivity
from precast.tuning.sites import OperationSite, TunedProgram
from precast.tuning.words import INFERENCE, TRAINING, TaskWords

__all__ = ["RowReasons", "error_text"]


@dataclass(frozen=True)
class RowReasons:
    """The reasons of the rows of a choice."""

    program: TunedProgram
    costs: ProgramCosts
    errors: Sensitivity
    chosen: Chosen
    objective: Objective

    def __call__(self, row: PolicyRow) -> str:
        """Return the reason of a row."""
        choice, low = self.chosen.choice, self.program.low
        in_16_bits = [site for site in row.sites if choice[site] is low]
        in_float32 = [site for site in row.sites if choice[site] is not low]
        parts = [self._of_16_bits(in_16_bits), *self._of_float32(in_float32)]
        return "; ".join(filter(None, parts))

    def _of_16_bits(self, sites: list[OperationSite]) -> str:
        """Return the costs of operations in 16 bits and in float32."""
        measured = [site for site in sites if len(self.costs.sites.get(site, {})) == 2]
        if not measured:
            return ""
        low, verb = self.program.low, "takes" if self.objective == "time" else self._words.needs
        narrow = self._amount(self._cost(measured, low))
        wide = self._amount(self._cost(measured, torch.float32))
        run = self._words.run
        return f"{dtype_name(low)} {verb} {narrow} a {run}, float32 {wide}{_count(sites)}"

    def _of_float32(self, sites: Iterable[OperationSite]) -> Iterator[str]:
        """Yield why operations are in float32: no 16-bit kernel, an error that is too large, or no gain."""
        name, prices, run = dtype_name(self.program.low), self.chosen.prices, self._words.run
        unable: list[OperationSite] = []
        too_wrong: list[OperationSite] = []
        others: list[OperationSite] = []
        for site in sites:
            errors = self.errors.sites.get(site)
            if site.barred:
                unable.append(site)
            elif errors is not None and (errors.barred or prices.get(site, 0.0) > 0):
                too_wrong.append(site)
            else:
                others.append(site)
        if unable:
            yield f"{name}: {unable[0].barred}{_count(unable)}"
        if too_wrong:
            worst = max(
                (self.errors.sites[site] for site in too_wrong),
                key=lambda errors: (bool(errors.barred), errors.gradient),
            )
            saved = sum(max(0.0, prices.get(site, 0.0)) for site in too_wrong)
            price = f", and would save {self._amount(saved)} a {run}" if saved else ""
            text = error_text(worst, is_inference=self.program.is_inference)
            yield f"{name} {text}{price}{_count(too_wrong)}"
        lost = -sum(prices.get(site, 0.0) for site in others)
        if others and lost > 0:
            with_casts = ", with its casts" if self.objective == "time" else ""
            yield f"{name} would cost {self._amount(lost)} more a {run}{with_casts}{_count(others)}"
        elif others:
            yield f"in float32 because its neighbours are{_count(others)}"

    def _cost(self, sites: Iterable[OperationSite], dtype: torch.dtype) -> float:
        return sum(self.costs.amount(site, dtype, self.objective) for site in sites)

    @property
    def _words(self) -> TaskWords:
        return INFERENCE if self.program.is_inference else TRAINING

    def _amount(self, amount: float) -> str:
        return milliseconds(amount) if self.objective == "time" else f"{amount / 2**10:,.3g} KiB"


def error_text(errors: PrecisionErrors, *, is_inference: bool = False) -> str:
    """Return the effect of 16 bits on an operation with these errors, with figures."""
    if errors.barred:
        return f"is excluded: {errors.barred}"
    gradient, loss = _percent(errors.gradient), _percent(errors.loss)
    if is_inference:
        return f"changes outputs by {gradient}, and the metric by {loss}"
    if errors.flushed > 0.1:
        return f"makes {errors.flushed:.0%} of the gradient of {errors.parameter} zero"
    subject = f"the gradient of {errors.parameter}" if errors.parameter else "gradients"
    return f"changes {subject} by {gradient}, and the loss by {loss}"


def _percent(square: float) -> str:
    share = math.sqrt(square)
    return f"{share:.0%}" if share >= 0.1 else f"{100 * share:.2g}%"


def _count(sites: list[OperationSite]) -> str:
    return f" ({plural(len(sites), 'place')})" if len(sites) > 1 else ""
