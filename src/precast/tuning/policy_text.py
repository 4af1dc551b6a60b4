"""Writes a choice as a policy: the long form has a row for each site.

Invariants:

- under the policy each site runs in the dtype that the choice gives it, in a region of the program's 16-bit dtype;
- rows for an operation of a module are in the rule of the module that calls it; those for operations that no module of
  the model runs are rows for the device type.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch

from precast.errors import PolicyError
from precast.policy.policy import Policy, Rule
from precast.tuning.sites import Choice, Program, Site

__all__ = ["dtype_under", "policy_of"]

_F32: Final = torch.float32
_FP32: Final = (Rule.FP32, Rule.FP32_SET_DTYPE, Rule.FP32_APPEND_DTYPE)


def policy_of(choice: Choice, program: Program, base: Policy) -> Policy:
    """The policy that carries out a choice, in its long form: with a row for every site.

    Args:
        choice: for every site of the program, float32 or the program's 16-bit dtype; see `Program.settle`.
        program: what the choice is about.
        base: the policy that holds for all else.

    Raises:
        PolicyError: the choice is not settled.
    """
    _check(choice, program)
    modules: dict[str, dict[str, Rule]] = {}
    outside: dict[str, Rule] = {}
    for site in program.sites:
        rows = outside if site.module is None else modules.setdefault(site.module, {})
        rows[site.op] = _rule(site, choice, program)
    return base.replace(
        name="tuned",
        ops={program.device: outside},
        modules={name: {"ops": rows} for name, rows in modules.items()},
    )


def dtype_under(
    rule: Rule | None, inputs: Iterable[tuple[torch.dtype, bool]], low: torch.dtype
) -> torch.dtype:
    """The dtype in which a site runs with a rule, by the dtypes of its inputs.

    Args:
        rule: the rule for it; None for none.
        inputs: the dtype of each input, and whether it decides.
        low: the dtype of the region.
    """
    if rule is Rule.LOWER:
        return low
    if rule in _FP32:
        return _F32
    given = list(inputs)
    deciding = {dtype for dtype, decides in given if decides or rule is Rule.PROMOTE}
    return low if deciding == {low} else _F32


def _check(choice: Choice, program: Program) -> None:
    if program.is_settled(choice):
        return
    settled = program.settle(choice)
    wrong = [site for site in program.sites if choice.get(site) is not settled[site]]
    raise PolicyError(
        f"no policy can carry out this choice: {wrong[0]} and {len(wrong) - 1} other sites cannot run as it says. "
        "Use program.settle(choice)."
    )


def _rule(site: Site, choice: Choice, program: Program) -> Rule:
    """The rule that makes a site run as chosen."""
    if any(edge.is_written for edge in program.inputs(site)):
        return site.rule or Rule.KEEP
    if choice[site] is not program.low:
        return site.rule if site.rule in _FP32 else Rule.FP32
    if site.rule is Rule.LOWER:
        return Rule.LOWER
    return Rule.KEEP if program.follows(site, choice) is program.low else Rule.LOWER
