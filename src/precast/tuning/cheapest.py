"""Chooses by costs: the policy that takes least time or memory within what errors are allowed.

Invariant: each of its rows has a reason with the figures that decided.
"""

from __future__ import annotations

from precast.policy.policy import Policy
from precast.tuning.choosing import Budget, Objective, choose
from precast.tuning.costs import Costs
from precast.tuning.held_back import words_of
from precast.tuning.policy_text import short_policy
from precast.tuning.reasons import reasons
from precast.tuning.sensitivity import Sensitivity
from precast.tuning.sites import Program

__all__ = ["cheapest"]


def cheapest(
    program: Program,
    errors: Sensitivity,
    costs: Costs,
    base: Policy,
    *,
    objective: Objective,
    loss: float,
    gradient: float,
    seconds: float,
) -> Policy:
    """The policy that costs least.

    Args:
        program: what is chosen for.
        errors: what 16 bits do to each site.
        costs: what each costs.
        base: the policy that holds for all else.
        objective: what is made small.
        loss: the relative error of the loss that all sites together may add.
        gradient: that of the gradient of each parameter.
        seconds: the time after which the best choice found so far is taken.
    """
    found = errors.sites
    limits = [
        Budget("loss", {frozenset({s}): each.loss for s, each in found.items()}, loss**2),
        Budget(
            "gradient", {frozenset({s}): each.gradient for s, each in found.items()}, gradient**2
        ),
    ]
    chosen = choose(
        program,
        costs,
        objective=objective,
        budgets=limits,
        held=[site for site, each in found.items() if each.barred],
        seconds=seconds,
    )
    held = {
        site: words_of(each)
        for site, each in found.items()
        if each.barred or chosen.prices.get(site, 0.0) > 0
    }
    why = reasons(program, costs, chosen, held, objective)
    return short_policy(chosen.choice, program, base, reason=why)
