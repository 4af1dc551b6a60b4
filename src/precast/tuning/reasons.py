"""The reason of each row of a tuned policy, with the figures that decided.

Invariant: every figure was measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from precast._internal.display import dtype_name, milliseconds, plural
from precast.tuning.chooser import Chosen
from precast.tuning.costs import ProgramCosts
from precast.tuning.error_meter import PrecisionErrors
from precast.tuning.options import Objective
from precast.tuning.policy_rows import PolicyRow
from precast.tuning.sensitivity import Sensitivity
from precast.tuning.sites import OperationSite, TunedProgram
from precast.tuning.words import INFERENCE, TRAINING

__all__ = ["RowReasons", "error_text"]

_Kind = Literal["in 16 bits", "unable", "too wrong", "dear"]


@dataclass(frozen=True)
class RowReasons:
    """The reasons of the rows of a choice."""

    program: TunedProgram
    costs: ProgramCosts
    errors: Sensitivity
    chosen: Chosen
    objective: Objective

    def __call__(self, row: PolicyRow) -> str:
        """Return the reason of a row: a clause for its operations of each kind, with their number."""
        groups: dict[_Kind, list[OperationSite]] = {}
        for site in sorted(row.sites, key=lambda site: self._kind(site) != "in 16 bits"):
            groups.setdefault(self._kind(site), []).append(site)
        clauses = ((self._clause(kind, sites), len(sites)) for kind, sites in groups.items())
        texts = (
            f"{text} ({plural(count, 'place')})" if count > 1 else text
            for text, count in clauses
            if text
        )
        return "; ".join(texts)

    def _kind(self, site: OperationSite) -> _Kind:
        errors = self.errors.sites.get(site)
        if self.chosen.choice[site] is self.program.low:
            return "in 16 bits"
        if site.barred:
            return "unable"
        if errors is not None and (errors.barred or self.chosen.prices.get(site, 0.0) > 0):
            return "too wrong"
        return "dear"

    def _clause(self, kind: _Kind, sites: Sequence[OperationSite]) -> str:
        low, objective, is_inference = self.program.low, self.objective, self.program.is_inference
        name, words = dtype_name(low), INFERENCE if is_inference else TRAINING
        prices = [self.chosen.prices.get(site, 0.0) for site in sites]
        if kind == "in 16 bits":
            if not any(len(self.costs.sites.get(site, {})) == 2 for site in sites):
                return ""
            verb = "takes" if objective == "time" else words.needs
            narrow, wide = (
                self._amount(sum(self.costs.amount(site, dtype, objective) for site in sites))
                for dtype in (low, torch.float32)
            )
            return f"{name} {verb} {narrow} a {words.run}, float32 {wide}"
        if kind == "unable":
            return f"{name}: {sites[0].barred}"
        if kind == "too wrong":
            errors = [self.errors.sites[site] for site in sites]
            worst = max(errors, key=lambda each: (bool(each.barred), each.gradient))
            saved = sum(price for price in prices if price > 0)
            price = f", and would save {self._amount(saved)} a {words.run}" if saved else ""
            return f"{name} {error_text(worst, is_inference=is_inference)}{price}"
        if sum(prices) < 0:
            with_casts = ", with its casts" if objective == "time" else ""
            return f"{name} would cost {self._amount(-sum(prices))} more a {words.run}{with_casts}"
        return "in float32 because its neighbours are"

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
