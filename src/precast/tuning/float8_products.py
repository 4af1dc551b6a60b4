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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from precast._internal.display import dtype_name
from precast.autocast_mode.region import autocast
from precast.errors import PrecastWarning
from precast.policy.module_rules import decide
from precast.policy.policy import Policy, Rule
from precast.policy.rows import FLOAT8_OPERATIONS, canonical
from precast.tuning.chooser import Objective
from precast.tuning.costs import CallCost, CallTrial, call_key, costs_in_turns, sum_of_calls
from precast.tuning.sensitivity import ErrorMeter, GroupErrors
from precast.tuning.setups import Setup
from precast.tuning.sites import CallRecord, OperationSite, TunedProgram
from precast.weights.float8.support import support_of

__all__ = ["Float8Choice", "Float8Product", "choose_products", "products_of", "setup_name"]
__all__ += ["with_products"]

_MOST_RUNS: Final = 32
"""The most products whose errors are measured alone."""


@dataclass
class Float8Product:
    """A product that runs in 16 bits, with its cost and errors in 8 bits.

    Attributes:
        site: the operation of a module.
        in_16_bits: the cost of its calls in a step.
        in_8_bits: the same under the float8 rule.
        loss: the square of the relative error that 8 bits add to the loss; None if not measured.
        gradient: that of the gradient that changes most.
        is_chosen: True if it runs in 8 bits.
    """

    site: OperationSite
    in_16_bits: CallCost
    in_8_bits: CallCost
    loss: float | None = None
    gradient: float | None = None
    is_chosen: bool = False

    def saves(self, objective: Objective) -> float:
        """Return the seconds or bytes a step that 8 bits save; below 0 where they cost more."""
        if objective == "memory":
            return self.in_16_bits.kept - self.in_8_bits.kept
        return self.in_16_bits.seconds - self.in_8_bits.seconds


@dataclass
class Float8Choice:
    """The products that run under a float8 rule.

    Attributes:
        rule: the rule.
        setup: the setup with them; None if there are none.
        because: the reason, a sentence without its end.
        products: all measured products.
    """

    rule: str
    setup: Setup | None
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
    seed: int = 0,
    deadline: float = math.inf,
) -> Float8Choice:
    """Choose the products of a 16-bit policy that run in 8 bits.

    Args:
        meter: compares with float32.
        program: the recorded program.
        around: the setup in 16 bits, whose policy holds for everything else.
        rule: a float8 rule.
        objective: the quantity to minimize.
        loss: the relative error of the loss that the policy may have, beside float32.
        gradient: that of the gradient of each parameter.
        seed: of the random tensors.
        deadline: on `time.monotonic`'s clock; products whose errors are not measured by then stay in 16 bits.
    """
    base = around.policy
    assert base is not None, "the setup is in 16 bits"
    products = measure_products(products_of(program, base), program, rule, seed, deadline)
    saving = [product for product in products if product.saves(objective) > 0]
    if not saving:
        return Float8Choice(rule, None, _no_gain_text(rule, products, objective, program), products)

    def setup_of(chosen: Sequence[Float8Product]) -> Setup:
        policy = with_products(base, [product.site for product in chosen], rule)
        return Setup(setup_name(rule), policy, program.low)

    def errors_of(chosen: Sequence[Float8Product]) -> GroupErrors:
        return meter.errors(setup_of(chosen))

    allowed = (loss**2, gradient**2)
    chosen, errors = saving, errors_of(saving)
    if not errors.fits(*allowed):
        start = meter.errors(around)
        _measure_alone(saving[:_MOST_RUNS], errors_of, start, deadline)
        chosen = [product for product in saving if product.loss is not None]
        chosen.sort(key=lambda p: p.saves(objective) / max(_share(p, allowed), 1e-12), reverse=True)
        while chosen := _fitting(chosen, start, allowed):
            errors = errors_of(chosen)
            if errors.fits(*allowed):
                break
            chosen = chosen[
                :-1
            ]  # together they lose more than their sum; drop the one of least worth
    if not chosen:
        text = f"each product in {rule} loses more than is allowed"
        return Float8Choice(rule, None, text, products)
    for product in chosen:
        product.is_chosen = True
    saved = sum(product.saves(objective) for product in chosen)
    amount = f"{saved / 2**20:.2f} MiB" if objective == "memory" else f"{saved * 1e3:.2f} ms a step"
    text = f"{len(chosen)} of {len(products)} products run in {rule}, which saves {amount}"
    setup = setup_of(chosen)
    return Float8Choice(
        rule, Setup(setup.name, setup.policy, setup.dtype, errors.silent), text, products
    )


def _measure_alone(
    products: Sequence[Float8Product],
    errors_of: Callable[[Sequence[Float8Product]], GroupErrors],
    start: GroupErrors,
    deadline: float,
) -> None:
    """Measure the errors that each product adds to those of the 16-bit policy."""
    for product in products:
        if time.monotonic() > deadline:
            break
        alone = errors_of([product])
        product.loss = max(0.0, alone.loss - start.loss)
        product.gradient = max(0.0, alone.gradient - start.gradient)


def _share(product: Float8Product, allowed: tuple[float, float]) -> float:
    return max((product.loss or 0.0) / allowed[0], (product.gradient or 0.0) / allowed[1])


def _fitting(
    products: Sequence[Float8Product], start: GroupErrors, allowed: tuple[float, float]
) -> list[Float8Product]:
    """Return the products, in their order, whose errors fit into the allowed ones by their sum."""
    loss, gradient = start.loss, start.gradient
    fitting = []
    for product in products:
        sums = loss + (product.loss or 0.0), gradient + (product.gradient or 0.0)
        if sums[0] <= allowed[0] and sums[1] <= allowed[1]:
            fitting.append(product)
            loss, gradient = sums
    return fitting


def products_of(program: TunedProgram, policy: Policy) -> list[OperationSite]:
    """Return the operations in 16 bits under a policy that a rule for their module can put in 8 bits."""
    sites = [
        site
        for site in program.sites
        if canonical(site.op) in FLOAT8_OPERATIONS and not (site.barred or site.pinned)
        if site.module is not None
        if policy.resolve(site.op, program.device, site.module).rule is Rule.LOWER
    ]
    return [site for site in sites if not _reaches_others(site, program)]


def _reaches_others(site: OperationSite, program: TunedProgram) -> bool:
    """Return True if a rule for the module would reach the same operation in modules inside it."""
    inside = f"{site.module}." if site.module else ""
    return any(
        other.op == site.op and other != site and (other.module or "").startswith(inside)
        for other in program.sites
        if other.module is not None
    )


def measure_products(
    sites: Sequence[OperationSite], program: TunedProgram, rule: str, seed: int, deadline: float
) -> list[Float8Product]:
    """Measure the cost of products in 16 bits and under a float8 rule; each distinct call once.

    Products that there is no time for, or that refuse random numbers, are missing.
    """
    costs: dict[object, dict[Any, CallCost]] = {}
    products = []
    for site in sites:
        for call in site.calls:
            if call_key(call) not in costs and not (costs and time.monotonic() > deadline):
                costs[call_key(call)] = _measure_call(call, program, rule, seed, deadline)
        total = sum_of_calls([(call, costs.get(call_key(call), {})) for call in site.calls])
        if len(total) == 2:
            products.append(Float8Product(site, total["lower"], total[rule]))
    return products


def _measure_call(
    call: CallRecord, program: TunedProgram, rule: str, seed: int, deadline: float
) -> dict[Any, CallCost]:
    """Return the cost of one call by the rule; nothing where it cannot be made."""
    operation = call.overload.partition(".")[0]
    base = Policy.load("default")
    trials = {}
    try:
        with torch.random.fork_rng([]), warnings.catch_warnings():
            warnings.simplefilter("ignore", PrecastWarning)
            for each in ("lower", rule):
                policy = base.replace(ops={operation: each})
                region = autocast(program.device, dtype=program.low, policy=policy)
                trials[each] = CallTrial(call, program.low, program.device, seed, region=region)
            return costs_in_turns(trials, deadline=deadline)
    except Exception:  # an operation may raise anything
        return {}


def with_products(policy: Policy, sites: Sequence[OperationSite], rule: str) -> Policy:
    """Return the policy with these products under a float8 rule; other rows of their modules stay."""
    modules: dict[str, dict[str, Any]] = {}
    for site in sites:
        assert site.module is not None, "a module runs it"
        if site.module not in modules:
            matching = decide(policy.patterns.matching(site.module), policy.modules, site.module)
            modules[site.module] = {} if matching is None else dict(matching[1].ops)
        modules[site.module][canonical(site.op)] = rule
    changed = {name: {"ops": rows} for name, rows in modules.items()}
    return policy.replace(name=setup_name(rule), modules=changed)


def setup_name(rule: str) -> str:
    """Return the name of the setup with products under a float8 rule."""
    return f"tuned with {rule}"


def _no_gain_text(
    rule: str, products: Sequence[Float8Product], objective: Objective, program: TunedProgram
) -> str:
    """Return why no product runs in 8 bits."""
    if not products:
        return f"{rule} is for products of matrices that modules run in 16 bits, and there are none"
    if objective == "memory":
        pairs = [(float(p.in_8_bits.kept), float(p.in_16_bits.kept)) for p in products]
        verb, amount = "keep for backward", "the memory"
    else:
        pairs = [(p.in_8_bits.seconds, p.in_16_bits.seconds) for p in products]
        verb, amount = "take", "the time"
    ratio = math.fsum(a for a, _ in pairs) / max(math.fsum(b for _, b in pairs), 1e-12)
    low = dtype_name(program.low)
    support = support_of(torch.device(program.device))
    return (
        f"{rule} saves nothing here: its products {verb} {ratio:.2f} times {amount} of {low} "
        f"({support.method.value}: {support.reason})"
    )
