"""Choice of matrix products that run in 8 bits, or in 16 bits with a float32 result.

Neither rule changes the dtype of another operation, so these products are chosen last, from a policy in 16 bits. Those
in 8 bits save something and lose little. Those with a float32 result (`lower_out_fp32`) are output heads and routers: a
loss, a softmax or a norm follows, which computes in float32.

Invariants:
- both costs of a product are measured in regions, in turns, with a float32 weight that is cast or quantized each time;
- a product that saves nothing on this machine stays in 16 bits, as all do where float8 is emulated and time counts;
- the errors of all chosen products together are measured beside float32;
- a product stays in 16 bits if its module's rule would reach other modules.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from precast._internal.display import dtype_name
from precast.autocast_mode.region import autocast
from precast.errors import PrecastWarning
from precast.policy.module_rules import decide
from precast.policy.policy import Policy, Rule, pattern_index
from precast.policy.rows import FLOAT8_OPERATIONS, PRODUCT_OPERATIONS, canonical
from precast.tuning.costs import CallCost, CallVariant, measure_calls
from precast.tuning.options import Objective
from precast.tuning.setups import Setup
from precast.tuning.sites import DtypeChoice, OperationSite, TunedProgram
from precast.tuning.tasks import ErrorMeter
from precast.weights.float8.support import support_of

__all__ = ["Float8Product", "ProductChoice", "choose_products", "choose_results", "products_of"]
__all__ += ["results_in_float32", "with_products"]

_MOST_RUNS: Final = 32
"""The most products whose errors are measured alone."""


@dataclass
class Float8Product:
    """A product that runs in 16 bits, with the cost of its calls in a step and its errors under a float8 rule.

    `loss` and `gradient` are squares of the relative errors that 8 bits add; None if they are not measured.
    """

    module: str
    op: str
    in_16_bits: CallCost
    in_8_bits: CallCost
    loss: float | None = None
    gradient: float | None = None
    is_chosen: bool = False

    def saves(self, objective: Objective) -> float:
        """Return the seconds or bytes a step that 8 bits save; below 0 where they cost more."""
        return self.in_16_bits.amount(objective) - self.in_8_bits.amount(objective)


@dataclass
class ProductChoice:
    """The products that were measured under a rule, and the reason for the choice, without the final stop."""

    rule: str
    because: str
    products: list[Float8Product] = field(default_factory=list)


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
    rule = Rule.LOWER_OUT_FP32
    products = results_in_float32(program, choice)
    if not products:
        because = (
            "is for products of modules whose results are used in float32 alone, and there are none"
        )
        return None, ProductChoice(rule, f"{rule} {because}")
    for sites in (products, [site for site in products if choice[site] is program.low]):
        changed = with_products(policy, sites, rule)
        setup = Setup(changed.name, changed, program.low)
        errors = meter.errors(setup)
        if sites and errors.fits(loss**2, gradient**2):
            because = f"{len(sites)} products have the rule {rule}"
            return replace(setup, silent=errors.silent), ProductChoice(rule, because)
    return None, ProductChoice(rule, f"{rule} loses more than is allowed")


def results_in_float32(program: TunedProgram, choice: DtypeChoice) -> list[OperationSite]:
    """Return the products whose results are used in float32 alone under a choice, or returned by the program."""
    used_low = {
        edge.producer for edge in program.edges if choice[edge.consumer] is not torch.float32
    }
    operations = PRODUCT_OPERATIONS[Rule.LOWER_OUT_FP32]
    return [site for site in reachable_products(program, operations) if site not in used_low]


def choose_products(
    meter: ErrorMeter,
    program: TunedProgram,
    around: Setup,
    rule: str,
    *,
    objective: Objective,
    loss: float,
    gradient: float,
    deadline: float = math.inf,
) -> tuple[Setup | None, ProductChoice]:
    """Choose the products of a 16-bit setup that run in 8 bits, and return the setup with them; None without any.

    `loss` and `gradient` are the relative errors that the policy may have, beside float32. Products whose errors are
    not measured by the `deadline`, on `time.monotonic`'s clock, stay in 16 bits.
    """
    base = around.policy
    assert base is not None, "the setup is in 16 bits"
    products = measure_products(products_of(program, base), program, rule, deadline)
    saving = [product for product in products if product.saves(objective) > 0]
    if not saving:
        because = _no_gain_text(rule, products, objective, program)
        return None, ProductChoice(rule, because, products)

    def setup_of(chosen: Sequence[Float8Product]) -> Setup:
        return Setup(f"tuned with {rule}", with_products(base, chosen, rule), program.low)

    allowed = (loss**2, gradient**2)
    chosen, errors = saving, meter.errors(setup_of(saving))
    if not errors.fits(*allowed):
        start, gains = meter.errors(around), list[tuple[float, Float8Product]]()
        for product in saving[:_MOST_RUNS]:
            if time.monotonic() < deadline:
                alone = meter.errors(setup_of([product]))
                product.loss = max(0.0, alone.loss - start.loss)
                product.gradient = max(0.0, alone.gradient - start.gradient)
                share = max(product.loss / loss**2, product.gradient / gradient**2)
                if share <= 1:
                    gains.append((product.saves(objective) / max(share, 1e-12), product))
        chosen = [product for _, product in sorted(gains, key=lambda gain: gain[0])]
        while chosen and not (errors := meter.errors(setup_of(chosen))).fits(*allowed):
            del chosen[0]  # the one that saves least for its error
    if not chosen:
        because = f"each product in {rule} loses more than is allowed"
        return None, ProductChoice(rule, because, products)
    for product in chosen:
        product.is_chosen = True
    saved = sum(product.saves(objective) for product in chosen)
    amount = f"{saved / 2**20:.2f} MiB" if objective == "memory" else f"{saved * 1e3:.2f} ms a step"
    because = f"{len(chosen)} of {len(products)} products run in {rule}, which saves {amount}"
    return replace(setup_of(chosen), silent=errors.silent), ProductChoice(rule, because, products)


def products_of(program: TunedProgram, policy: Policy) -> list[OperationSite]:
    """Return the operations in 16 bits under a policy that a rule for their module can put in 8 bits.

    A rule for a module with modules inside that have the same operation would reach these, too.
    """
    return [
        site
        for site in reachable_products(program, FLOAT8_OPERATIONS)
        if policy.resolve(f"{site.op}.default", program.device, site.module).rule is Rule.LOWER
    ]


def reachable_products(
    program: TunedProgram, operations: Collection[str]
) -> Iterator[OperationSite]:
    """Yield the sites of some operations that a rule for their module can change, and no other site with it."""
    places = [(site.op, f"{site.module}.") for site in program.sites if site.module is not None]
    for site in program.sites:
        if (
            canonical(site.op) in operations
            and not (site.barred or site.pinned or site.module is None)
            and sum(op == site.op and at.startswith(_prefix(site)) for op, at in places) == 1
        ):
            yield site


def _prefix(site: OperationSite) -> str:
    return f"{site.module}." if site.module else ""


def measure_products(
    sites: Sequence[OperationSite], program: TunedProgram, rule: str, deadline: float
) -> list[Float8Product]:
    """Measure the cost of products in 16 bits and under a float8 rule, apart from those that there is no time for."""
    base = Policy.load("default")
    variants = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecastWarning)
        for each in ("lower", rule):
            policy = base.replace(ops=dict.fromkeys(FLOAT8_OPERATIONS, each))
            region = autocast(program.device, dtype=program.low, policy=policy)
            variants[each] = CallVariant(program.low, region)
        costs, _ = measure_calls(program, sites, variants, deadline=deadline)
    return [
        Float8Product(str(site.module), site.op, total["lower"], total[rule])
        for site, total in costs.items()
        if len(total) == len(variants)
    ]


def with_products(
    policy: Policy, products: Sequence[Float8Product | OperationSite], rule: str
) -> Policy:
    """Return the policy with these products of modules under a rule; other rows of their modules stay."""
    modules: dict[str, dict[str, Any]] = {}
    for product in products:
        name = str(product.module)
        if name not in modules:
            matching = decide(pattern_index(policy).matching(name), policy.modules, name)
            modules[name] = {} if matching is None else dict(matching[1].ops)
        modules[name][canonical(product.op)] = rule
    changed = {name: {"ops": rows} for name, rows in modules.items()}
    return policy.replace(name=f"tuned with {rule}", modules=changed)


def _no_gain_text(
    rule: str, products: Sequence[Float8Product], objective: Objective, program: TunedProgram
) -> str:
    """Return why no product runs in 8 bits."""
    if not products:
        return f"{rule} is for products of matrices that modules run in 16 bits, and there are none"
    in_8_bits = math.fsum(product.in_8_bits.amount(objective) for product in products)
    in_16_bits = math.fsum(product.in_16_bits.amount(objective) for product in products)
    ratio = f"{in_8_bits / max(in_16_bits, 1e-12):.2f} times the"
    needs = f"take {ratio} time" if objective == "time" else f"keep for backward {ratio} memory"
    support = support_of(torch.device(program.device))
    return (
        f"{rule} saves nothing here: its products {needs} of {dtype_name(program.low)} "
        f"({support.method.value}: {support.reason})"
    )
