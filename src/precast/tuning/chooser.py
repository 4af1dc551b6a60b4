"""Choice of the dtype of every operation: the least time or memory within the allowed errors, by integer programming.

Each operation has a variable x, which is 1 in 16 bits. Its cost is linear in x, apart from casts: an edge between two
dtypes costs a cast, the variable z >= x(consumer) - x(producer), or the reverse. A weight is cast once for all its
consumers: y >= x for each. An operation that differs from the base policy's rule pays a small penalty, because it needs
a row in the file, and a row of a module slows its calls down.

Invariants:
- the choice is settled (`TunedProgram.settle`), and the best one by these costs unless the solver ran out of time;
- an operation that is excluded from 16 bits, or has an infinite error, is in float32.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from precast._internal.missing import missing_extra
from precast.policy.policy import Rule
from precast.tuning.costs import Objective, ProgramCosts
from precast.tuning.error_meter import PrecisionErrors
from precast.tuning.policy_rows import FLOAT32_RULES
from precast.tuning.sites import DtypeChoice, OperationSite, TensorEdge, TunedProgram

__all__ = ["Chosen", "choose"]

_F32: Final = torch.float32
_SECONDS: Final = 60.0
_ROW_PENALTY: Final = 1e-3
"""The share of the cost of a step that an operation has to save to be worth a row; less with many operations."""
_TOTAL_ROW_PENALTY: Final = 0.1
"""The share that rows for all operations together have to save."""


@dataclass(frozen=True)
class Chosen:
    """A choice and its prices.

    Attributes:
        choice: the dtype of every operation.
        prices: for each operation that stays in float32 and could run in 16 bits, the seconds or bytes a step that it
            alone would save in 16 bits; below 0 where its casts would cost more than it saves.
    """

    choice: DtypeChoice
    prices: Mapping[OperationSite, float] = field(default_factory=dict)


def choose(
    program: TunedProgram,
    costs: ProgramCosts,
    errors: Mapping[OperationSite, PrecisionErrors],
    *,
    objective: Objective = "time",
    loss: float = math.inf,
    gradient: float = math.inf,
    seconds: float = _SECONDS,
) -> Chosen:
    """Return the choice that costs least.

    Args:
        program: the operations.
        costs: their costs.
        errors: their errors in 16 bits.
        objective: the quantity to minimize.
        loss: the square of the relative error of the loss that all operations in 16 bits may add.
        gradient: the same for the gradient of each parameter.
        seconds: the time after which the best choice so far is taken.

    Raises:
        MissingExtraError: SciPy is not installed.
    """
    model = _IntegerProgram(program, costs, objective)
    model.hold([site for site in program.sites if site.barred])
    model.hold([site for site, each in errors.items() if each.barred])
    model.tie()
    model.limit({site: each.loss for site, each in errors.items()}, loss)
    model.limit({site: each.gradient for site, each in errors.items()}, gradient)
    choice = program.choose(model.solve(seconds))
    wide = [
        site
        for site in program.sites
        if choice[site] is not program.low and not site.barred
        if not any(edge.is_written for edge in program.inputs(site))
    ]
    return Chosen(choice, _CostTerms(program, costs, objective).saved_in_16_bits(choice, wide))


class _CostTerms:
    """The costs of operations, edges and weights by the objective."""

    def __init__(self, program: TunedProgram, costs: ProgramCosts, objective: Objective) -> None:
        self._costs = costs
        self._program = program
        self._objective = objective
        casting = [e for e in program.edges if not e.is_written and _is_cast(e)]
        self.edges = [edge for edge in casting if not edge.weight]
        self.weights: dict[str, list[OperationSite]] = {}
        self._largest: dict[str, TensorEdge] = {}
        for edge in casting:
            if edge.weight:
                self.weights.setdefault(edge.weight, []).append(edge.consumer)
                largest = self._largest.get(edge.weight, edge)
                self._largest[edge.weight] = max(largest, edge, key=lambda each: each.elements)
        total = math.fsum(costs.amount(site, _F32, objective) for site in program.sites)
        self._row = total * min(_ROW_PENALTY, _TOTAL_ROW_PENALTY / max(1, len(program.sites)))

    def site(self, site: OperationSite, dtype: torch.dtype) -> float:
        """Return the cost of an operation in a dtype, with the penalty for a row."""
        is_low = dtype is self._program.low
        differs = (site.rule is Rule.LOWER and not is_low) or (
            site.rule in FLOAT32_RULES and is_low
        )
        return self._costs.amount(site, dtype, self._objective) + self._row * differs

    def edge(self, edge: TensorEdge, producer: torch.dtype, consumer: torch.dtype) -> float:
        """Return the cost of the casts along an edge. The operation counts the memory of its casts."""
        if producer is consumer or self._objective == "memory":
            return 0.0
        return edge.count * self._casts(edge, down=consumer is self._program.low)

    def weight(self, name: str) -> float:
        """Return the cost of one 16-bit copy of a weight; in inference weights are stored in 16 bits, which saves."""
        edge, is_time = self._largest[name], self._objective == "time"
        if self._program.is_inference:
            return 0.0 if is_time else -2.0 * edge.elements
        return self._casts(edge, down=True) if is_time else 2.0 * edge.elements

    def saved_in_16_bits(
        self, choice: DtypeChoice, sites: Collection[OperationSite]
    ) -> dict[OperationSite, float]:
        """Return the cost that each of these operations in float32 would save if it alone ran in 16 bits."""
        edges: dict[OperationSite | None, set[TensorEdge]] = {site: set() for site in sites}
        for edge in self.edges:
            for site in (edge.producer, edge.consumer):
                if site in edges:
                    edges[site].add(edge)
        weights: dict[OperationSite, set[str]] = {site: set() for site in sites}
        for name, consumers in self.weights.items():
            for site in weights.keys() & set(consumers):
                weights[site].add(name)

        def cost(site: OperationSite, under: DtypeChoice) -> float:
            around = sum(self._edge_under(edge, under) for edge in edges[site])
            stored = sum(self._weight_under(name, under) for name in weights[site])
            return self.site(site, under[site]) + around + stored

        low = self._program.low
        return {site: cost(site, choice) - cost(site, {**choice, site: low}) for site in sites}

    def _edge_under(self, edge: TensorEdge, choice: DtypeChoice) -> float:
        """Return the cost of the casts along an edge under a choice."""
        return self.edge(edge, edge.dtype_under(choice), choice[edge.consumer])

    def _weight_under(self, name: str, choice: DtypeChoice) -> float:
        is_low = [choice[site] is self._program.low for site in self.weights[name]]
        is_copied = all(is_low) if self._program.is_inference else any(is_low)
        return self.weight(name) * is_copied

    def _casts(self, edge: TensorEdge, *, down: bool) -> float:
        """Return the time of a cast, and of the cast of the gradient back."""
        back = self._costs.cast(edge.elements, down=not down) if edge.needs_grad else 0.0
        return self._costs.cast(edge.elements, down=down) + back


def _is_cast(edge: TensorEdge) -> bool:
    """Return True if a tensor is cast where its dtype is not the consumer's."""
    return edge.decides or edge.consumer.rule is Rule.LOWER


class _IntegerProgram:
    """The variables, costs and constraints of the integer program."""

    def __init__(self, program: TunedProgram, costs: ProgramCosts, objective: Objective) -> None:
        self._program = program
        self._terms = _CostTerms(program, costs, objective)
        self._x = {site: i for i, site in enumerate(program.sites)}
        self._cost = [
            self._terms.site(site, program.low) - self._terms.site(site, _F32)
            for site in program.sites
        ]
        self._constraints: list[tuple[dict[int, float], float, float]] = []
        """The coefficients of each constraint, and the least and the most that they may add up to."""
        self._add_edges()
        self._add_weights()

    def hold(self, sites: Collection[OperationSite]) -> None:
        """Keep operations in float32, except those that write to a tensor from outside: they have its dtype."""
        for site in sites:
            in_place = [edge for edge in self._program.inputs(site) if edge.is_written]
            if not in_place or any(edge.producer is not None for edge in in_place):
                self._constrain({self._x[site]: 1.0}, most=0.0)

    def tie(self) -> None:
        """Give in-place operations their target's dtype, and operations that no rule can lower that of their inputs."""
        for site in self._program.sites:
            inputs = self._program.inputs(site)
            in_place = [edge for edge in inputs if edge.is_written]
            for edge in in_place:
                self._relate(site, edge, least=0.0)
            if not site.casts_down and not in_place:
                for edge in inputs:
                    if edge.decides:
                        self._relate(site, edge, least=-1.0)

    def limit(self, errors: Mapping[OperationSite, float], most: float) -> None:
        """Keep the sum of errors within a limit."""
        self.hold([site for site, error in errors.items() if not math.isfinite(error)])
        row = {self._x[site]: e for site, e in errors.items() if math.isfinite(e) and e > 0}
        largest = max(row.values(), default=0.0)
        if largest > 0 and math.isfinite(most):
            self._constrain({i: e / largest for i, e in row.items()}, most=most / largest)

    def solve(self, seconds: float) -> list[OperationSite]:
        """Return the operations that run in 16 bits; none if the time ends before any solution."""
        if not self._x:
            return []
        numpy, optimize, sparse = _import_scipy()
        count = len(self._cost)
        scale = max(map(abs, self._cost), default=0.0) or 1.0
        ends = [0]
        columns: list[int] = []
        values: list[float] = []
        for row, _, _ in self._constraints:
            columns += row.keys()
            values += row.values()
            ends.append(len(columns))
        constraints = [
            optimize.LinearConstraint(
                sparse.csr_array((values, columns, ends), shape=(len(self._constraints), count)),
                [least for _, least, _ in self._constraints],
                [most for _, _, most in self._constraints],
            )
        ] * bool(self._constraints)
        solution = optimize.milp(
            [cost / scale for cost in self._cost],
            integrality=[int(i < len(self._x)) for i in range(count)],
            bounds=optimize.Bounds(0.0, 1.0),
            constraints=constraints,
            options={"time_limit": seconds, "mip_rel_gap": 0.0},
        )
        if solution.x is None:
            return []
        low = numpy.round(solution.x[: len(self._x)])
        return [site for site, i in self._x.items() if low[i]]

    def _add_edges(self) -> None:
        low = self._program.low
        for edge in self._terms.edges:
            down = self._terms.edge(edge, _F32, low)
            up = self._terms.edge(edge, low, _F32)
            x = self._x[edge.consumer]
            if edge.dtype is not None or edge.producer is None:
                self._cost[x] += -up if edge.dtype is low else down
            elif edge.producer != edge.consumer:
                self._add_cast(x, self._x[edge.producer], down)
                self._add_cast(self._x[edge.producer], x, up)

    def _add_cast(self, low: int, wide: int, cost: float) -> None:
        """Add a cast whose cost counts if `low` is 1 and `wide` is 0."""
        if cost > 0:
            cast_variable = self._add_variable(cost)
            self._constrain({cast_variable: 1.0, low: -1.0, wide: 1.0}, least=0.0)

    def _add_weights(self) -> None:
        for weight, consumers in self._terms.weights.items():
            cast_variable = self._add_variable(self._terms.weight(weight))
            sign = -1.0 if self._program.is_inference else 1.0
            for site in set(
                consumers
            ):  # in inference the memory is saved only if all use it in 16 bits
                self._constrain({cast_variable: sign, self._x[site]: -sign}, least=0.0)

    def _relate(self, site: OperationSite, edge: TensorEdge, *, least: float) -> None:
        """Make the variable of an operation at most its producer's; with `least=0`, equal to it."""
        x = self._x[site]
        if edge.producer is None or edge.dtype is not None:
            is_low = float(edge.dtype is self._program.low)
            self._constrain({x: 1.0}, least=is_low + least, most=is_low)
        elif edge.producer != site:
            self._constrain({x: 1.0, self._x[edge.producer]: -1.0}, least=least, most=0.0)

    def _add_variable(self, cost: float) -> int:
        self._cost.append(cost)
        return len(self._cost) - 1

    def _constrain(
        self, row: dict[int, float], *, least: float = -math.inf, most: float = math.inf
    ) -> None:
        self._constraints.append((row, least, most))


def _import_scipy() -> tuple[Any, Any, Any]:
    try:
        import numpy
        from scipy import optimize, sparse
    except ModuleNotFoundError as error:
        raise missing_extra("precast.tune", "scipy", "tune") from error
    return numpy, optimize, sparse
