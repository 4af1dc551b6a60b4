"""Choice of the products with 16-bit factors and a float32 result: those whose result is used in float32 alone.

Output heads and routers are such products: a loss, a softmax or a norm follows, which computes in float32. The rule
`lower_out_fp32` changes neither the dtype of another operation nor the casts between them. So these products are chosen
last, as those in 8 bits are.
"""

from __future__ import annotations

from typing import Final

import torch

from precast.policy.policy import Policy, Rule
from precast.policy.rows import PRODUCT_OPERATIONS
from precast.tuning.float8_products import ProductChoice, reachable_products, with_products
from precast.tuning.setups import Setup
from precast.tuning.sites import DtypeChoice, OperationSite, TunedProgram
from precast.tuning.tasks import ErrorMeter

__all__ = ["choose_results", "results_in_float32"]

_RULE: Final = Rule.LOWER_OUT_FP32


def choose_results(
    meter: ErrorMeter,
    program: TunedProgram,
    choice: DtypeChoice,
    policy: Policy,
    *,
    loss: float,
    gradient: float,
) -> tuple[Setup | None, ProductChoice]:
    """Return the setup of a policy with float32 results of 16-bit products; None if that loses too much.

    If all of them together lose too much, those that the choice has in float32 stay there. `loss` and `gradient` are
    the relative errors that the policy may have, beside float32.
    """
    products = results_in_float32(program, choice)
    for sites in (products, [site for site in products if choice[site] is program.low]):
        if not sites:
            break
        changed = with_products(policy, sites, _RULE)
        setup = Setup(changed.name, changed, program.low)
        errors = meter.errors(setup)
        if errors.fits(loss**2, gradient**2):
            because = f"{len(sites)} products have the rule {_RULE}"
            return Setup(changed.name, changed, program.low, errors.silent), ProductChoice(
                _RULE, because
            )
    because = (
        f"{_RULE} loses more than is allowed"
        if products
        else f"{_RULE} is for products of modules whose results are used in float32 alone, and there are none"
    )
    return None, ProductChoice(_RULE, because)


def results_in_float32(program: TunedProgram, choice: DtypeChoice) -> list[OperationSite]:
    """Return the products whose results are used in float32 alone under a choice, or returned by the program."""
    used_low = {
        edge.producer for edge in program.edges if choice[edge.consumer] is not torch.float32
    }
    operations = PRODUCT_OPERATIONS[_RULE]
    return [site for site in reachable_products(program, operations) if site not in used_low]
