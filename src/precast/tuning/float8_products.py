"""Choice of the matrix products of a 16-bit policy that run in 8 bits: those that save something and lose little.

A product under a float8 rule has 16-bit inputs and outputs, as in 16 bits. So nothing around it changes, and the
products are chosen last, from a policy in 16 bits.

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
from precast.policy.rows import FLOAT8_OPERATIONS, canonical
from precast.tuning.costs import CallCost, CallVariant, measure_calls
from precast.tuning.options import Objective
from precast.tuning.setups import Setup
from precast.tuning.sites import OperationSite, TunedProgram
from precast.tuning.tasks import ErrorMeter
from precast.weights.float8.support import support_of

__all__ = ["Float8Product", "ProductChoice", "choose_products", "products_of"]
__all__ += ["reachable_products", "with_products"]

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
            and sum(op == site.op and _is_inside(at, site.module) for op, at in places) == 1
        ):
            yield site


def _is_inside(place: str, module: str) -> bool:
    return not module or place.startswith(f"{module}.")


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
    verb = (
        "take {:.2f} times the time"
        if objective == "time"
        else "keep for backward {:.2f} times the memory"
    )
    in_8_bits, in_16_bits = (
        math.fsum(cost.amount(objective) for cost in costs)
        for costs in zip(*((p.in_8_bits, p.in_16_bits) for p in products), strict=True)
    )
    ratio = verb.format(in_8_bits / max(in_16_bits, 1e-12))
    support = support_of(torch.device(program.device))
    return (
        f"{rule} saves nothing here: its products {ratio} of {dtype_name(program.low)} "
        f"({support.method.value}: {support.reason})"
    )
