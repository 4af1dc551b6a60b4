"""Which products of a 16-bit policy are worth running in 8 bits: what that saves on this machine, and what it loses.

A product under a float8 rule takes and gives 16-bit tensors, as it does in 16 bits. So nothing around it changes, and
which products run so can be chosen after everything else, beginning with a policy that is in 16 bits.

Invariants:

- both costs of a product are measured in regions, in turns, with a float32 weight that is cast or quantised each time;
- what saves nothing here is not chosen, as all products where float8 is emulated and time counts;
- the errors of all that are chosen are measured together, beside float32, before the policy is handed out;
- an operation whose rule would reach other modules is left in 16 bits.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Final, Literal

import torch
from torch import Tensor

from precast import _torch
from precast._internal.display import dtype_name
from precast.autocast_mode.region import autocast
from precast.errors import PrecastWarning
from precast.policy.module_rules import decide
from precast.policy.policy import Policy, Rule
from precast.policy.rows import FLOAT8_OPERATIONS, canonical
from precast.tuning.calls import arguments_of, is_castable, made, tensors_in_order
from precast.tuning.costs import key_of
from precast.tuning.estimating import Cost
from precast.tuning.sensitivity import ErrorMeter, Errors
from precast.tuning.sites import Call, Program, Site
from precast.tuning.timing import Figure, in_turns
from precast.tuning.training import Setup
from precast.weights.float8.support import support_of

__all__ = [
    "Found",
    "Product",
    "in_8_bits",
    "measured",
    "named",
    "products",
    "with_8_bits",
    "with_products",
]

_ROUNDS: Final = 7
_MOST_RUNS: Final = 32
"""Products whose errors are measured alone at most."""
_NOTHING: Final = Cost(Figure(0.0))


@dataclass
class Product:
    """A product that runs in 16 bits, and what it would cost and lose in 8.

    Attributes:
        site: the operation of a module.
        in_16_bits: the cost of its calls in a step.
        in_8_bits: the same under the float8 rule.
        loss: the square of the relative error that it adds to the loss, beside the 16-bit policy; None if not measured.
        gradient: that of the gradient which changes most.
        is_chosen: whether it runs in 8 bits.
    """

    site: Site
    in_16_bits: Cost
    in_8_bits: Cost
    loss: float | None = None
    gradient: float | None = None
    is_chosen: bool = False

    def saves(self, objective: Literal["time", "memory"]) -> float:
        """What 8 bits save, in seconds or bytes for a step; below 0 where they cost more."""
        if objective == "memory":
            return self.in_16_bits.kept - self.in_8_bits.kept
        return self.in_16_bits.seconds - self.in_8_bits.seconds


@dataclass
class Found:
    """What a float8 rule is worth in a model.

    Attributes:
        rule: the rule.
        policy: the policy with the chosen products under it; None where none is.
        because: why it is what it is, in a sentence without its end.
        products: what was measured.
        silent: a parameter whose gradient is zero under the policy; empty where there is none.
    """

    rule: str
    policy: Policy | None
    because: str
    products: list[Product] = field(default_factory=list)
    silent: str = ""


def in_8_bits(
    meter: ErrorMeter,
    program: Program,
    around: Setup,
    rule: str,
    *,
    objective: Literal["time", "memory"],
    loss: float,
    gradient: float,
    seed: int = 0,
    deadline: float = math.inf,
) -> Found:
    """Finds the products of a 16-bit policy that are worth running in 8 bits.

    Args:
        meter: compares with float32.
        program: what was recorded.
        around: the setup that is in 16 bits; its policy is kept for all that is not chosen.
        rule: a float8 rule.
        objective: what is made small.
        loss: the relative error of the loss that the policy may have, beside float32.
        gradient: that of the gradient of each parameter.
        seed: of the random tensors that costs are measured with.
        deadline: on `time.monotonic`'s clock; products whose errors are not known by then share those of all.
    """
    assert around.policy is not None, "the setup is in 16 bits"
    sites = products(program, around.policy)
    known = measured(sites, program, rule, seed=seed, deadline=deadline)
    found = [Product(site, *known[site]) for site in sites if site in known]
    saving = [product for product in found if product.saves(objective) > 0]
    if not saving:
        return Found(rule, None, _saves_nothing(rule, found, objective, program), found)
    search = _Search(meter, program, around, rule, (loss**2, gradient**2))
    policy, errors = search.chosen(saving, objective, deadline)
    chosen = sum(product.is_chosen for product in found)
    if policy is None:
        return Found(rule, None, f"each product in {rule} loses more than is allowed", found)
    saved = sum(product.saves(objective) for product in found if product.is_chosen)
    said = (
        f"{chosen} of {len(found)} products run in {rule}, which saves {_figure(saved, objective)}"
    )
    return Found(rule, policy, said, found, errors.silent)


def products(program: Program, policy: Policy) -> list[Site]:
    """The sites that run in 16 bits under a policy, and that a rule for their module can put in 8."""
    found = [
        site
        for site in program.sites
        if canonical(site.op) in FLOAT8_OPERATIONS and not (site.barred or site.pinned)
        if site.module is not None
        if policy.resolve(site.op, program.device, site.module).rule is Rule.LOWER
    ]
    return [site for site in found if not _reaches_others(site, program)]


def measured(
    sites: Sequence[Site],
    program: Program,
    rule: str,
    *,
    seed: int = 0,
    deadline: float = math.inf,
) -> dict[Site, tuple[Cost, Cost]]:
    """What the calls of each site cost in 16 bits and under a float8 rule; each distinct call is measured once.

    Calls for which there is no time, or that refuse random numbers, and their sites, are missing.
    """
    known: dict[object, tuple[Cost, Cost]] = {}
    found: dict[Site, tuple[Cost, Cost]] = {}
    for site in sites:
        total = [_NOTHING, _NOTHING]
        for call in site.calls:
            key = key_of(call)
            if key not in known and not (known and time.monotonic() > deadline):
                costs = _measured(call, program, rule, seed, deadline)
                known |= {} if costs is None else {key: costs}
            if key not in known:
                break
            total = [_sum(a, b, call) for a, b in zip(total, known[key], strict=True)]
        else:
            found[site] = (total[0], total[1])
    return found


def with_8_bits(policy: Policy, sites: Sequence[Site], rule: str) -> Policy:
    """The policy with these products under a float8 rule; what it says of their modules otherwise stays."""
    modules: dict[str, dict[str, Any]] = {}
    for site in sites:
        assert site.module is not None, "a module runs it"
        if site.module not in modules:
            there = decide(policy.patterns.matching(site.module), policy.modules, site.module)
            modules[site.module] = {} if there is None else dict(there[1].ops)
        modules[site.module][canonical(site.op)] = rule
    changed = {name: {"ops": rows} for name, rows in modules.items()}
    return policy.replace(name=named(rule), modules=changed)


def with_products(program: Program, setups: Sequence[Setup]) -> Setup:
    """The last of the setups that has products in 16 bits; where none has, the last."""
    having = (s for s in reversed(setups) if s.policy and products(program, s.policy))
    return next(having, setups[-1])


def named(rule: str) -> str:
    """The name of the setup that has products under a float8 rule."""
    return f"tuned with {rule}"


class _Search:
    """Chooses among products that save something."""

    def __init__(
        self,
        meter: ErrorMeter,
        program: Program,
        around: Setup,
        rule: str,
        allowed: tuple[float, float],
    ) -> None:
        self._meter = meter
        self._program = program
        self._around = around
        self._rule = rule
        self._allowed = allowed

    def chosen(
        self, found: list[Product], objective: Literal["time", "memory"], deadline: float
    ) -> tuple[Policy | None, Errors]:
        """The policy with the products that fit into what is allowed, those that save most for their error first."""
        errors = self._errors(found)
        if errors.fits(*self._allowed):
            return self._made(found), errors
        before = self._meter.errors(self._around)
        for product in found[:_MOST_RUNS]:
            if time.monotonic() > deadline:
                break
            alone = self._errors([product])
            product.loss = max(0.0, alone.loss - before.loss)
            product.gradient = max(0.0, alone.gradient - before.gradient)
        left = [product for product in found if product.loss is not None]
        left.sort(key=lambda p: p.saves(objective) / max(self._share(p), 1e-12), reverse=True)
        while left:
            fitting = self._fitting(left, before)
            errors = self._errors(fitting) if fitting else errors
            if fitting and errors.fits(*self._allowed):
                return self._made(fitting), errors
            left = fitting[
                :-1
            ]  # together they lose more than the sum; the worst for its error goes
        return None, errors

    def _fitting(self, products: Sequence[Product], before: Errors) -> list[Product]:
        loss, gradient = before.loss, before.gradient
        taken = []
        for product in products:
            more = loss + (product.loss or 0.0), gradient + (product.gradient or 0.0)
            if more[0] <= self._allowed[0] and more[1] <= self._allowed[1]:
                taken.append(product)
                loss, gradient = more
        return taken

    def _share(self, product: Product) -> float:
        """Which share of what is allowed a product takes."""
        loss, gradient = self._allowed
        return max((product.loss or 0.0) / loss, (product.gradient or 0.0) / gradient)

    def _errors(self, products: Sequence[Product]) -> Errors:
        policy = self._policy(products)
        return self._meter.errors(Setup(f"{len(products)} products", policy, self._program.low))

    def _made(self, products: Sequence[Product]) -> Policy:
        for product in products:
            product.is_chosen = True
        return self._policy(products)

    def _policy(self, products: Sequence[Product]) -> Policy:
        assert self._around.policy is not None, "the setup is in 16 bits"
        sites = [product.site for product in products]
        return with_8_bits(self._around.policy, sites, self._rule)


def _reaches_others(site: Site, program: Program) -> bool:
    """Whether a rule for the module of a site would reach the same operation in modules below."""
    inside = f"{site.module}." if site.module else ""
    return any(
        other.op == site.op and other != site and (other.module or "").startswith(inside)
        for other in program.sites
        if other.module is not None
    )


def _sum(total: Cost, one: Cost, call: Call) -> Cost:
    return Cost(
        total.forward.plus(one.forward.times(call.count + call.recomputed)),
        total.backward.plus(one.backward.times(call.count)),
        total.kept + one.kept * (call.count - min(call.count, call.recomputed)),
    )


def _measured(
    call: Call, program: Program, rule: str, seed: int, deadline: float
) -> tuple[Cost, Cost] | None:
    """The cost of one call in 16 bits, and under the rule; None where it cannot be made."""
    operation = call.overload.partition(".")[0]
    base = Policy.load("default")
    low = base.replace(ops={operation: "lower"})
    trials = [
        _Trial(call, program, each, seed) for each in (low, base.replace(ops={operation: rule}))
    ]
    try:
        with torch.random.fork_rng([]), warnings.catch_warnings():
            warnings.simplefilter("ignore", PrecastWarning)
            works: dict[tuple[int, str], Callable[[], float]] = {
                (place, part): getattr(trial, part)
                for place, trial in enumerate(trials)
                for part in ("forward", "backward")
            }
            figures = in_turns(works, _ROUNDS, deadline)
            kept = [trial.kept() for trial in trials]
    except Exception:  # an operation may raise anything
        return None
    lower, rules = (
        Cost(figures[place, "forward"], figures[place, "backward"], kept[place])
        for place in range(2)
    )
    return lower, rules


class _Trial:
    """One call in a region with a policy, that can be timed."""

    def __init__(self, call: Call, program: Program, policy: Policy, seed: int) -> None:
        generator = torch.Generator(program.device).manual_seed(seed)
        function = _torch.find_overload(call.overload)
        assert function is not None, f"{call.overload} was recorded"
        self._function = function
        self._region = autocast(program.device, dtype=program.low, policy=policy)

        def as_given(_: int, argument: Any) -> torch.dtype:
            is_cast = is_castable(argument.dtype) and not (argument.stays or argument.is_weight)
            return program.low if is_cast else argument.dtype

        self._args, self._kwargs = made(call, as_given, generator)
        tensors = tensors_in_order(self._args, self._kwargs)
        self._leaves = [tensor for tensor in tensors if tensor.requires_grad]
        pairs = zip(tensors, arguments_of(call), strict=True)
        self._weights = {id(t.untyped_storage()) for t, argument in pairs if argument.is_weight}

    def forward(self) -> float:
        """Runs forward; the seconds that it took."""
        start = perf_counter()
        with self._region:
            self._function(*self._args, **self._kwargs)
        return perf_counter() - start

    def backward(self) -> float:
        """Runs forward and backward; the seconds that backward took."""
        with self._region:
            result = self._function(*self._args, **self._kwargs)
        if not result.requires_grad:
            return 0.0
        gradient = torch.ones_like(result)
        start = perf_counter()
        torch.autograd.grad(result, self._leaves, gradient, allow_unused=True)
        return perf_counter() - start

    def kept(self) -> int:
        """The bytes of the memory that autograd keeps, each storage once, without weights."""
        kept: dict[int, Any] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if id(storage) not in self._weights:
                kept[id(storage)] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), self._region:
            result = self._function(*self._args, **self._kwargs)
        del result
        return sum(storage.nbytes() for storage in kept.values())


def _saves_nothing(
    rule: str, found: Sequence[Product], objective: Literal["time", "memory"], program: Program
) -> str:
    """Why no product runs in 8 bits."""
    if not found:
        return f"{rule} is for products of matrices that modules run in 16 bits, and there are none"
    low = dtype_name(program.low)
    support = support_of(torch.device(program.device))
    pairs: list[tuple[float, float]]
    if objective == "memory":
        pairs = [(product.in_8_bits.kept, product.in_16_bits.kept) for product in found]
        what = "keep for backward"
    else:
        pairs = [(product.in_8_bits.seconds, product.in_16_bits.seconds) for product in found]
        what = "take"
    ratio = math.fsum(a for a, _ in pairs) / max(math.fsum(b for _, b in pairs), 1e-12)
    amount = "the time" if objective == "time" else "the memory"
    return (
        f"{rule} saves nothing here: its products {what} {ratio:.2f} times {amount} that they do in {low} "
        f"({support.way.value}: {support.reason})"
    )


def _figure(saved: float, objective: Literal["time", "memory"]) -> str:
    return f"{saved / 2**20:.2f} MiB" if objective == "memory" else f"{saved * 1e3:.2f} ms a step"
