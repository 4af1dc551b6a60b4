"""Says why each row of a tuned policy is there, with the figures that decided, and where the policy was found.

Invariant: every figure was measured; what was not measured is not spoken of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from precast._internal.display import milliseconds, size
from precast._internal.version import __version__
from precast.diagnostics.hardware.doctor import processor
from precast.tuning.choosing import Chosen
from precast.tuning.costs import Costs
from precast.tuning.fewest_rows import Row
from precast.tuning.sites import Program, Site

__all__ = ["header", "reasons"]


def reasons(
    program: Program, costs: Costs, chosen: Chosen, errors: Mapping[Site, str] | None = None
) -> Callable[[Row], str]:
    """What `text_of` asks for the reason of each row.

    Args:
        program: what was recorded.
        costs: what was measured.
        chosen: the choice, and what each site in float32 would save.
        errors: what held a site back, in a few words with figures, such as "adds 3.1% to the loss".
    """
    known = errors or {}

    def reason(row: Row) -> str:
        low = [site for site in row.sites if chosen.choice[site] is program.low]
        wide = [site for site in row.sites if chosen.choice[site] is not program.low]
        parts = [_of_low(low, program, costs), *_of_wide(wide, program, chosen, known)]
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
    threads = f", {size(torch.get_num_threads(), 'thread')}" if device == "cpu" else ""
    return (
        f"Found by precast {__version__} with PyTorch {torch.__version__} on {date}, seed {seed}.",
        f"Machine: {processor(torch.device(device))}{threads}. Elsewhere, measure again.",
        f"Command: {command}",
    )


def _of_low(sites: list[Site], program: Program, costs: Costs) -> str:
    measured = [site for site in sites if len(costs.sites.get(site, {})) == 2]
    if not measured:
        return ""
    name = _name(program.low)
    wide = sum(costs.seconds(site, torch.float32) for site in measured)
    low = sum(costs.seconds(site, program.low) for site in measured)
    return f"{name} takes {milliseconds(low)} a step, float32 {milliseconds(wide)}{_count(sites)}"


def _of_wide(
    sites: list[Site], program: Program, chosen: Chosen, errors: Mapping[Site, str]
) -> Iterable[str]:
    """Why sites are in float32: they cannot be in 16 bits, an error held them back, or that saves nothing."""
    name = _name(program.low)
    barred = [site for site in sites if site.barred]
    held = [site for site in sites if site in errors and not site.barred]
    others = [site for site in sites if site not in errors and not site.barred]
    if barred:
        yield f"{name}: {barred[0].barred}{_count(barred)}"
    if held:
        saved = sum(max(0.0, chosen.prices.get(site, 0.0)) for site in held)
        price = f", and would save {milliseconds(saved)} a step" if saved else ""
        yield f"{name} {errors[held[0]]}{price}{_count(held)}"
    lost = -sum(chosen.prices.get(site, 0.0) for site in others)
    if others and lost > 0:
        yield f"{name} would cost {milliseconds(lost)} more a step, with its casts{_count(others)}"
    elif others:
        yield f"kept in float32 for the sake of what is around it{_count(others)}"


def _count(sites: list[Site]) -> str:
    return f" ({size(len(sites), 'place')})" if len(sites) > 1 else ""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
