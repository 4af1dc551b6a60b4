"""Says why each row of a tuned policy is there, with the figures that decided, and where the policy was found.

Invariant: every figure was measured, or is "about" an estimate from what was; what is not known is not spoken of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from precast._internal.display import dtype_name, milliseconds, size
from precast._internal.version import __version__
from precast.tuning.choosing import Chosen, Objective
from precast.tuning.costs import Costs
from precast.tuning.fewest_rows import Row
from precast.tuning.sites import Program, Site
from precast.tuning.words import INFERENCE, TRAINING, Words

__all__ = ["header", "reasons"]


def reasons(
    program: Program,
    costs: Costs,
    chosen: Chosen,
    errors: Mapping[Site, str] | None = None,
    objective: Objective = "time",
) -> Callable[[Row], str]:
    """What `text_of` and `short_policy` ask for the reason of each row.

    Args:
        program: what was recorded.
        costs: what was measured.
        chosen: the choice, and what each site in float32 would save.
        errors: what held a site back, in a few words with figures, such as "adds 3.1% to the loss".
        objective: what was chosen by, of which the figures are.
    """
    known = errors or {}
    figures = _Figures(program, costs, chosen, objective)

    def reason(row: Row) -> str:
        low = [site for site in row.sites if chosen.choice[site] is program.low]
        wide = [site for site in row.sites if chosen.choice[site] is not program.low]
        parts = [figures.of_low(low), *figures.of_wide(wide, known)]
        return "; ".join(filter(None, parts))

    return reason


def header(command: str, *, seed: int, date: str, device: str = "cpu") -> tuple[str, ...]:
    """The lines at the top of a tuned policy.

    Args:
        command: what was run.
        seed: of the random numbers.
        date: when, as YYYY-MM-DD.
        device: the type of the device that it ran on.
    """
    from precast.diagnostics.hardware.doctor import processor  # which loads what prints

    threads = f", {size(torch.get_num_threads(), 'thread')}" if device == "cpu" else ""
    return (
        f"Found by precast {__version__} with PyTorch {torch.__version__} on {date}, seed {seed}.",
        f"Machine: {processor(torch.device(device))}{threads}. Elsewhere, measure again.",
        f"Command: {command}",
    )


@dataclass(frozen=True)
class _Figures:
    """What was measured, in words."""

    program: Program
    costs: Costs
    chosen: Chosen
    objective: Objective

    def of_low(self, sites: list[Site]) -> str:
        """Why sites are in 16 bits: what they cost there, beside float32."""
        measured = [site for site in sites if len(self.costs.sites.get(site, {})) == 2]
        if not measured:
            return ""
        name, low = dtype_name(self.program.low), self.program.low
        costs = self.costs.seconds if self.objective == "time" else self.costs.kept
        here = self._said(sum(costs(site, low) for site in measured))
        wide = self._said(sum(costs(site, torch.float32) for site in measured))
        verb = "takes" if self.objective == "time" else self._words.needs
        if any(site in self.costs.estimated for site in measured):
            verb += " about"  # as some of it was estimated
        return f"{name} {verb} {here} a {self._run}, float32 {wide}{_count(sites)}"

    def of_wide(self, sites: list[Site], errors: Mapping[Site, str]) -> Iterable[str]:
        """Why sites are in float32: they cannot be in 16 bits, an error held them back, or that saves nothing."""
        name, prices = dtype_name(self.program.low), self.chosen.prices
        barred = [site for site in sites if site.barred]
        held = [site for site in sites if site in errors and not site.barred]
        others = [site for site in sites if site not in errors and not site.barred]
        if barred:
            yield f"{name}: {barred[0].barred}{_count(barred)}"
        if held:
            saved = sum(max(0.0, prices.get(site, 0.0)) for site in held)
            price = f", and would save {self._said(saved)} a {self._run}" if saved else ""
            yield f"{name} {errors[held[0]]}{price}{_count(held)}"
        lost = -sum(prices.get(site, 0.0) for site in others)
        if others and lost > 0:
            with_casts = ", with its casts" if self.objective == "time" else ""
            more = f"{self._said(lost)} more a {self._run}"
            yield f"{name} would cost {more}{with_casts}{_count(others)}"
        elif others:
            yield f"kept in float32 for the sake of what is around it{_count(others)}"

    @property
    def _words(self) -> Words:
        return INFERENCE if self.program.is_inference else TRAINING

    @property
    def _run(self) -> str:
        return self._words.run

    def _said(self, amount: float) -> str:
        return milliseconds(amount) if self.objective == "time" else f"{amount / 2**10:,.3g} KiB"


def _count(sites: list[Site]) -> str:
    return f" ({size(len(sites), 'place')})" if len(sites) > 1 else ""
