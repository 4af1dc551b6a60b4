"""Chooses the dtype of every site: the least time or memory within error budgets, by an integer linear program.

A site is a variable x, which is 1 if it runs in 16 bits. Time is linear in it but for casts: an edge whose ends differ
costs a cast, which is a variable z >= x(consumer) - x(producer), or the other way. A weight is cast once for all of its
consumers: y >= x for each. Without budgets this is a minimum cut, which is why relaxations of it are nearly integral;
with them it is a knapsack on a graph, and HiGHS solves it by branch and bound.

A rule for a module makes each call of it slower by its hooks, which is a variable too: a site whose dtype is not what
the rows of the device type give it needs a rule for its module. For each operation one of these rows is chosen.

Invariants:

- a choice is settled, and proven to be the best one by these costs unless the solver ran out of time, which it says;
- `total` is what is minimized, but for what differs from the usual, so any choice can be compared with the chosen one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import torch

from precast._internal.missing import missing_extra
from precast.policy.policy import Rule
from precast.tuning.costs import Costs
from precast.tuning.fewest_rows import dtype_under, fewest_rows
from precast.tuning.row_costs import RowCosts
from precast.tuning.sites import Choice, Edge, Program, Site

__all__ = ["Budget", "Chosen", "Objective", "choose", "total", "usual_choice"]

Objective = Literal["time", "memory"]
_F32: Final = torch.float32
_SECONDS: Final = 60.0


@dataclass(frozen=True)
class Budget:
    """A limit to the sum of errors.

    Attributes:
        name: what it limits, such as "loss".
        errors: group of sites -> the error that it adds as soon as one of them runs in 16 bits; at least 0. Errors that
            are independent add as their squares do, so squares are what a caller gives here.
        limit: the most that they may add up to.
    """

    name: str
    errors: Mapping[frozenset[Site], float]
    limit: float

    def used(self, choice: Choice) -> float:
        """What the errors of a choice add up to."""
        return sum(
            error
            for group, error in self.errors.items()
            if any(choice.get(site, _F32) is not _F32 for site in group)
        )


@dataclass(frozen=True)
class Chosen:
    """The best choice.

    Attributes:
        choice: the dtype of every site.
        total: what it costs, in seconds or bytes for a step.
        prices: each site that stays in float32 although it could run in 16 bits -> what it would save if it alone
            changed, in seconds or bytes for a step; below 0 where its casts would cost more than it saves.
        used: what each budget's errors add up to, by its name.
        is_proven: whether no other choice is better by these costs; False if the solver ran out of time.
    """

    choice: Choice
    total: float
    prices: Mapping[Site, float] = field(default_factory=dict)
    used: Mapping[str, float] = field(default_factory=dict)
    is_proven: bool = True


def choose(
    program: Program,
    costs: Costs,
    *,
    objective: Objective = "time",
    budgets: Sequence[Budget] = (),
    held: Collection[Site] = (),
    never_together: Sequence[Collection[Site]] = (),
    usual: Choice | None = None,
    worth: float = 0.0,
    seconds: float = _SECONDS,
) -> Chosen:
    """The choice that costs least.

    A site that runs otherwise than usual has to be worth it: what it saves less `worth` is what counts. So differences
    that are smaller than what measuring can tell make no rows.

    Args:
        program: what is chosen for.
        costs: what was measured.
        objective: the time of a step, or the memory that it keeps for backward.
        budgets: limits to errors.
        held: sites that must stay in float32.
        never_together: groups of which not all may run in 16 bits, as a proof has shown.
        usual: what sites run in by the base policy; see `usual_choice`.
        worth: what each site that differs from that has to save, in seconds or bytes for a step; at least 0.
        seconds: the time after which the best choice found so far is taken.

    Raises:
        MissingExtraError: scipy is not installed.
    """
    held = {site for site in program.sites if site.barred} | set(held)
    model = _Model(program, costs, objective)
    model.hold(held)
    model.tie()
    if objective == "time":
        model.pay_for_rows(costs.hook)
    if usual is not None:
        model.prefer(usual, worth)
    for budget in budgets:
        model.limit(budget)
    for group in never_together:
        model.forbid(group)
    low, is_proven = model.solved(seconds)
    choice = program.choose(low)
    return Chosen(
        choice,
        total(program, costs, choice, objective),
        dict(_prices(program, costs, choice, objective)),
        {budget.name: budget.used(choice) for budget in budgets},
        is_proven,
    )


def usual_choice(program: Program) -> Choice:
    """The dtype of each site by the rules of the base policy, without any row of a choice."""
    found: dict[Site, torch.dtype] = {}
    for (
        site
    ) in program.sites:  # in the order in which they first run, so their inputs are mostly known
        inputs = program.inputs(site)
        known = [e for e in inputs if e.dtype is not None or e.producer in found]
        written = [edge.dtype_under(found) for edge in known if edge.is_written]
        dtypes = [(edge.dtype_under(found), edge.decides) for edge in known]
        rule = Rule.KEEP if written else site.rule
        found[site] = written[0] if written else dtype_under(rule, dtypes, program.low)
    return program.settle(found)


def total(program: Program, costs: Costs, choice: Choice, objective: Objective = "time") -> float:
    """What a settled choice costs: the seconds of a step with its casts, or the bytes that are kept for backward."""
    known = _Terms(program, costs, objective)
    sum_ = sum(known.site(site, choice[site]) for site in program.sites)
    for edge in known.edges:
        sum_ += known.edge(edge, edge.dtype_under(choice), choice[edge.consumer])
    for weight, consumers in known.weights.items():
        is_low = [choice[site] is program.low for site in consumers]
        if all(is_low) if program.is_inference else any(is_low):
            sum_ += known.weight(weight)
    return sum_ + known.rows(choice)


class _Terms:
    """What sites, edges and weights cost, by the objective."""

    def __init__(self, program: Program, costs: Costs, objective: Objective) -> None:
        self._costs = costs
        self._program = program
        self._low = program.low
        self._is_time = objective == "time"
        casting = [e for e in program.edges if not e.is_written and _is_cast(e)]
        self.edges = [edge for edge in casting if not edge.weight]
        self.weights: dict[str, list[Site]] = {}
        self._largest: dict[str, Edge] = {}
        for edge in casting:
            if edge.weight:
                self.weights.setdefault(edge.weight, []).append(edge.consumer)
                known = self._largest.get(edge.weight, edge)
                self._largest[edge.weight] = max(known, edge, key=lambda each: each.elements)

    def site(self, site: Site, dtype: torch.dtype) -> float:
        """What a site costs in a dtype."""
        if self._is_time:
            return self._costs.seconds(site, dtype)
        return self._costs.kept(site, dtype)

    def edge(self, edge: Edge, producer: torch.dtype, consumer: torch.dtype) -> float:
        """What the casts of an edge cost; a site counts what it keeps of them."""
        if producer is consumer or not self._is_time:
            return 0.0
        return edge.count * self._casts(edge, down=consumer is self._low)

    def weight(self, name: str) -> float:
        """What one 16-bit copy of a weight costs; where weights are stored as they are used, what that saves."""
        edge = self._largest[name]
        if self._program.is_inference:
            return 0.0 if self._is_time else -2.0 * edge.elements
        return self._casts(edge, down=True) if self._is_time else 2.0 * edge.elements

    def rows(self, choice: Choice) -> float:
        """What the rows cost that a choice needs: the hooks of rules for modules, and for others one call's.

        A row that saves less than that is not worth a line.
        """
        if not self._is_time or not self._costs.hook:
            return 0.0
        rows = fewest_rows(choice, self._program)
        places = {row.place for row in rows if row.place is not None}
        calls = sum(max(1, self._program.hooks(place)) for place in places)
        return self._costs.hook * (calls + sum(row.place is None for row in rows))

    def _casts(self, edge: Edge, *, down: bool) -> float:
        """A cast, and that of the gradient back."""
        there = self._costs.cast(edge.elements, down=down)
        back = self._costs.cast(edge.elements, down=not down) if edge.needs_grad else 0.0
        return there + back


def _is_cast(edge: Edge) -> bool:
    """Whether a tensor is cast where its dtype is not the consumer's; those that decide nothing stay as they are."""
    return edge.decides or edge.consumer.rule is Rule.LOWER


class _Model:
    """The integer linear program: its variables, its costs and its constraints."""

    def __init__(self, program: Program, costs: Costs, objective: Objective) -> None:
        self._program = program
        self._terms = _Terms(program, costs, objective)
        self._x = {site: i for i, site in enumerate(program.sites)}
        self._whole = set(self._x.values())
        """The variables that are 0 or 1, and nothing between."""
        self._cost = [
            self._terms.site(site, program.low) - self._terms.site(site, _F32)
            for site in program.sites
        ]
        self._rows: list[tuple[dict[int, float], float, float]] = []
        """Each constraint: the coefficients of its variables, and the least and the most that they may add up to."""
        self._add_edges()
        self._add_weights()

    def hold(self, sites: Collection[Site]) -> None:
        """Keeps sites in float32, but for those that write to nothing but a tensor from outside: that has its dtype."""
        for site in sites:
            written = [edge for edge in self._program.inputs(site) if edge.is_written]
            if not written or any(edge.producer is not None for edge in written):
                self._row({self._x[site]: 1.0}, most=0.0)

    def tie(self) -> None:
        """Lets operations in place have the dtype of what they write to, and followers that of what they follow."""
        for site in self._program.sites:
            inputs = self._program.inputs(site)
            written = [edge for edge in inputs if edge.is_written]
            for edge in written:
                self._relate(site, edge, least=0.0)
            if not site.casts_down and not written:
                for edge in inputs:
                    if edge.decides:
                        self._relate(site, edge, least=-1.0)

    def prefer(self, usual: Choice, worth: float) -> None:
        """Makes what differs from a choice cost extra."""
        for site, x in self._x.items():
            self._cost[x] += worth if usual[site] is _F32 else -worth

    def pay_for_rows(self, hook: float) -> None:
        """Makes rules for modules cost the calls that they make slower, and a row of the device type one of them."""
        if not hook:
            return
        rows = RowCosts(self._program, self._x, self._variable, self._whole)
        for row, least, most in rows.constraints(hook):
            self._row(row, least=least, most=most)

    def limit(self, budget: Budget) -> None:
        """Keeps the errors of a choice within a budget."""
        row: dict[int, float] = {}
        for group, error in budget.errors.items():
            if not math.isfinite(error):
                self.hold([site for site in group if site in self._x])
                continue
            sites = [self._x[site] for site in group if site in self._x]
            if len(sites) == 1:
                row[sites[0]] = row.get(sites[0], 0.0) + error
            elif sites:
                paid = self._variable(0.0)
                row[paid] = error
                for x in sites:
                    self._row({paid: 1.0, x: -1.0}, least=0.0)
        largest = max(map(abs, row.values()), default=0.0)
        if largest > 0:
            scaled = {i: error / largest for i, error in row.items()}
            self._row(scaled, most=budget.limit / largest)

    def forbid(self, group: Collection[Site]) -> None:
        """Keeps at least one of these sites in float32."""
        sites = [self._x[site] for site in group if site in self._x]
        if sites:
            self._row(dict.fromkeys(sites, 1.0), most=len(sites) - 1.0)

    def solved(self, seconds: float) -> tuple[list[Site], bool]:
        """The sites that run in 16 bits, and whether that is proven to be the best."""
        if not self._x:
            return [], True
        numpy, optimize, sparse = _scipy()
        count = len(self._cost)
        scale = max(map(abs, self._cost), default=0.0) or 1.0
        ends = [0]
        columns: list[int] = []
        values: list[float] = []
        for row, _, _ in self._rows:
            columns += row.keys()
            values += row.values()
            ends.append(len(columns))
        constraints = [
            optimize.LinearConstraint(
                sparse.csr_array((values, columns, ends), shape=(len(self._rows), count)),
                [least for _, least, _ in self._rows],
                [most for _, _, most in self._rows],
            )
        ] * bool(self._rows)
        found = optimize.milp(
            [cost / scale for cost in self._cost],
            integrality=[int(i in self._whole) for i in range(count)],
            bounds=optimize.Bounds(0.0, 1.0),
            constraints=constraints,
            options={"time_limit": seconds, "mip_rel_gap": 0.0},
        )
        if found.x is None:  # out of time before anything was found
            return [], False
        low = numpy.round(found.x[: len(self._x)])
        return [site for site, i in self._x.items() if low[i]], bool(found.status == 0)

    def _add_edges(self) -> None:
        low = self._program.low
        for edge in self._terms.edges:
            down = self._terms.edge(edge, _F32, low)
            up = self._terms.edge(edge, low, _F32)
            x = self._x[edge.consumer]
            if edge.dtype is not None or edge.producer is None:
                if edge.dtype is low:
                    self._cost[x] -= up
                else:
                    self._cost[x] += down
            elif edge.producer != edge.consumer:
                self._add_cast(x, self._x[edge.producer], down)
                self._add_cast(self._x[edge.producer], x, up)

    def _add_cast(self, low: int, wide: int, cost: float) -> None:
        """A cost that is paid if one variable is 1 and the other 0."""
        if cost > 0:
            paid = self._variable(cost)
            self._row({paid: 1.0, low: -1.0, wide: 1.0}, least=0.0)

    def _add_weights(self) -> None:
        for weight, consumers in self._terms.weights.items():
            paid = self._variable(self._terms.weight(weight))
            for site in set(consumers):
                if self._program.is_inference:  # it is saved only where all use it in 16 bits
                    self._row({paid: -1.0, self._x[site]: 1.0}, least=0.0)
                else:
                    self._row({paid: 1.0, self._x[site]: -1.0}, least=0.0)

    def _relate(self, site: Site, edge: Edge, *, least: float) -> None:
        """Makes a site's variable at most its producer's and, by `least` of 0, the same."""
        x = self._x[site]
        if edge.producer is None or edge.dtype is not None:
            is_low = float(edge.dtype is self._program.low)
            self._row({x: 1.0}, least=is_low + least, most=is_low)
        elif edge.producer != site:
            self._row({x: 1.0, self._x[edge.producer]: -1.0}, least=least, most=0.0)

    def _variable(self, cost: float) -> int:
        self._cost.append(cost)
        return len(self._cost) - 1

    def _row(
        self, row: dict[int, float], *, least: float = -math.inf, most: float = math.inf
    ) -> None:
        self._rows.append((row, least, most))


def _prices(
    program: Program,
    costs: Costs,
    choice: Choice,
    objective: Objective,
) -> Iterator[tuple[Site, float]]:
    """What each site in float32 would save if it alone ran in 16 bits."""
    terms = _Terms(program, costs, objective)
    touching: dict[Site, set[Edge]] = {}
    for edge in terms.edges:
        for site in filter(None, (edge.producer, edge.consumer)):
            touching.setdefault(site, set()).add(edge)
    weights: dict[Site, set[str]] = {}
    for weight, consumers in terms.weights.items():
        wide = {site for site in consumers if choice[site] is not program.low}
        if len(wide) == 1 if program.is_inference else wide == set(consumers):
            for site in wide:
                weights.setdefault(site, set()).add(weight)
    for site in program.sites:
        is_tied = any(edge.is_written for edge in program.inputs(site))
        if choice[site] is program.low or site.barred or is_tied:
            continue
        changed = _Changed(choice, site, program.low)
        saved = terms.site(site, _F32) - terms.site(site, program.low)
        for edge in touching.get(site, ()):
            saved += terms.edge(edge, edge.dtype_under(choice), choice[edge.consumer])
            saved -= terms.edge(edge, edge.dtype_under(changed), changed[edge.consumer])
        saved -= sum(map(terms.weight, weights.get(site, ())))
        yield site, saved


class _Changed(Mapping[Site, torch.dtype]):
    """A choice with one site changed."""

    def __init__(self, choice: Choice, site: Site, dtype: torch.dtype) -> None:
        self._choice = choice
        self._changed = site, dtype

    def __getitem__(self, site: Site) -> torch.dtype:
        return self._changed[1] if site == self._changed[0] else self._choice[site]

    def __iter__(self) -> Iterator[Site]:
        return iter(self._choice)

    def __len__(self) -> int:
        return len(self._choice)


def _scipy() -> tuple[Any, Any, Any]:
    try:
        import numpy
        from scipy import optimize, sparse
    except ModuleNotFoundError as error:
        raise missing_extra("precast.tune", "scipy", "tune") from error
    return numpy, optimize, sparse
