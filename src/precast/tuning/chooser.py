"""Choice of the dtype of every operation: the least time or memory within the allowed errors, by integer programming.

Each operation has a variable x, which is 1 in 16 bits. Its own cost is linear in x. Casts and copies of weights are
*terms*: a term is paid if one operation runs in 16 bits while another one runs in float32, so it has a variable
z >= x - x' for each two of them. An operation that differs from the base policy's rule pays a small penalty, because it
needs a row in the file, and a row of a module slows its calls down.

Invariants:
- the choice is settled (`TunedProgram.settle`), and the best one by these costs unless the solver ran out of time;
- an operation that is excluded from 16 bits, or has an infinite error, is in float32;
- every figure in the reason of a row was measured.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Final, NamedTuple

import torch

from precast._internal.display import dtype_name, milliseconds, plural
from precast.policy.policy import Rule
from precast.policy.rows import FLOAT32_RULES
from precast.tuning.costs import ProgramCosts
from precast.tuning.options import Objective, import_scipy
from precast.tuning.policy_rows import PolicyRow
from precast.tuning.sites import DtypeChoice, OperationSite, TensorEdge, TunedProgram
from precast.tuning.tasks import PrecisionErrors
from precast.tuning.words import INFERENCE, TRAINING

__all__ = ["choose", "error_text", "reason_of"]

_F32: Final = torch.float32
_ROW_PENALTY: Final = 1e-3
"""The share of the cost of a step that an operation has to save to be worth a row; less with many operations."""
_TOTAL_ROW_PENALTY: Final = 0.1
"""The share that rows for all operations together have to save."""


def choose(
    program: TunedProgram,
    costs: ProgramCosts,
    errors: Mapping[OperationSite, PrecisionErrors],
    *,
    objective: Objective = "time",
    loss: float = math.inf,
    gradient: float = math.inf,
    seconds: float = 60.0,
) -> DtypeChoice:
    """Return the choice that costs least by the objective.

    `loss` and `gradient` are squares of the relative errors that all operations in 16 bits together may add. After
    `seconds` the best choice so far is taken.
    """
    model = _IntegerProgram(program, _linear_costs(program, costs, objective))
    for term in _terms(program, costs, objective):
        model.add(term)
    model.hold([site for site in program.sites if site.barred])
    model.hold([site for site, each in errors.items() if each.barred])
    model.tie()
    model.limit({site: each.loss for site, each in errors.items()}, loss)
    model.limit({site: each.gradient for site, each in errors.items()}, gradient)
    return program.choose(model.solve(seconds))


class _Term(NamedTuple):
    """A cost that is paid if one of `low` runs in 16 bits and one of `wide` in float32; an empty one does not count."""

    cost: float
    low: Collection[OperationSite] = ()
    wide: Collection[OperationSite] = ()


def _linear_costs(
    program: TunedProgram, costs: ProgramCosts, objective: Objective
) -> dict[OperationSite, float]:
    """Return the additional cost of each operation in 16 bits, with the penalty for a row in either dtype."""
    total = math.fsum(costs.amount(site, _F32, objective) for site in program.sites)
    penalty = total * min(_ROW_PENALTY, _TOTAL_ROW_PENALTY / max(1, len(program.sites)))
    return {
        site: costs.amount(site, program.low, objective)
        - costs.amount(site, _F32, objective)
        + penalty * ((site.rule in FLOAT32_RULES) - (site.rule is Rule.LOWER))
        for site in program.sites
    }


def _terms(program: TunedProgram, costs: ProgramCosts, objective: Objective) -> Iterator[_Term]:
    """Yield the costs of casts along edges, and of one 16-bit copy of each weight for all its consumers.

    The memory of casts is counted at the operations that keep them. In inference a weight is stored in 16 bits if all
    its consumers use it in 16 bits, and else takes two more bytes for each element.
    """

    def cast(edge: TensorEdge, *, down: bool) -> float:
        """Return the time of a cast, and of the cast of the gradient back."""
        back = costs.cast(edge.elements, down=not down) if edge.needs_grad else 0.0
        return costs.cast(edge.elements, down=down) + back

    weights: dict[str, list[TensorEdge]] = {}
    for edge in program.edges:
        if edge.is_written or not (edge.decides or edge.consumer.rule is Rule.LOWER):
            continue
        if edge.weight:
            weights.setdefault(edge.weight, []).append(edge)
        elif objective == "time" and edge.producer != edge.consumer:
            producers = [] if edge.producer is None or edge.dtype is not None else [edge.producer]
            if producers or edge.dtype is not program.low:
                yield _Term(edge.count * cast(edge, down=True), [edge.consumer], producers)
            if producers or edge.dtype is program.low:
                yield _Term(edge.count * cast(edge, down=False), producers, [edge.consumer])
    for edges in weights.values():
        consumers = list(dict.fromkeys(edge.consumer for edge in edges))
        largest = max(edges, key=lambda edge: edge.elements)
        if objective == "memory":
            groups = ([], consumers) if program.is_inference else (consumers, [])
            yield _Term(2.0 * largest.elements, *groups)
        elif not program.is_inference:
            yield _Term(cast(largest, down=True), consumers)


class _IntegerProgram:
    """The variables, costs and constraints of the integer program."""

    def __init__(self, program: TunedProgram, linear: Mapping[OperationSite, float]) -> None:
        self._program = program
        self._x = {site: i for i, site in enumerate(program.sites)}
        self._cost = [linear[site] for site in program.sites]
        self._constraints: list[tuple[dict[int, float], float, float]] = []
        """The coefficients of each constraint, and the least and the most that they may add up to."""

    def add(self, term: _Term) -> None:
        """Add a variable that is at least 1 if the term is paid; a term without a cost has no effect."""
        if term.cost <= 0:
            return
        paid = len(self._cost)
        self._cost.append(term.cost)
        lows = [{self._x[site]: -1.0} for site in term.low] or [{}]
        wides = [{self._x[site]: 1.0} for site in term.wide] or [{}]
        for low, wide in itertools.product(lows, wides):
            self._constrain({paid: 1.0} | low | wide, least=float(not low))

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
        optimize, sparse = import_scipy("optimize"), import_scipy("sparse")
        count = len(self._cost)
        scale = max(map(abs, self._cost), default=0.0) or 1.0
        rows = [row for row, _, _ in self._constraints]
        ends = [0, *itertools.accumulate(map(len, rows))]
        columns = [column for row in rows for column in row]
        values = [value for row in rows for value in row.values()]
        constraints = [
            optimize.LinearConstraint(
                sparse.csr_array((values, columns, ends), shape=(len(rows), count)),
                [least for _, least, _ in self._constraints],
                [most for _, _, most in self._constraints],
            )
        ] * bool(rows)
        solution = optimize.milp(
            [cost / scale for cost in self._cost],
            integrality=[int(i < len(self._x)) for i in range(count)],
            bounds=optimize.Bounds(0.0, 1.0),
            constraints=constraints,
            options={"time_limit": seconds, "mip_rel_gap": 0.0},
        )
        if solution.x is None:
            return []
        return [site for site, i in self._x.items() if solution.x[i] > 0.5]

    def _relate(self, site: OperationSite, edge: TensorEdge, *, least: float) -> None:
        """Make the variable of an operation at most its producer's; with `least=0`, equal to it."""
        x = self._x[site]
        if edge.producer is None or edge.dtype is not None:
            is_low = float(edge.dtype is self._program.low)
            self._constrain({x: 1.0}, least=is_low + least, most=is_low)
        elif edge.producer != site:
            self._constrain({x: 1.0, self._x[edge.producer]: -1.0}, least=least, most=0.0)

    def _constrain(
        self, row: dict[int, float], *, least: float = -math.inf, most: float = math.inf
    ) -> None:
        self._constraints.append((row, least, most))


def reason_of(
    row: PolicyRow,
    program: TunedProgram,
    costs: ProgramCosts,
    errors: Mapping[OperationSite, PrecisionErrors],
    choice: DtypeChoice,
    *,
    objective: Objective,
) -> str:
    """Return the reason of a row: the effect of 16 bits on its operations in float32, and the costs in both dtypes."""
    low, words = dtype_name(program.low), INFERENCE if program.is_inference else TRAINING
    wide = [site for site in row.sites if choice[site] is _F32]
    clauses = []
    if barred := next((site.barred for site in wide if site.barred), ""):
        clauses.append(f"{low}: {barred}")
    elif site_errors := [errors[site] for site in wide if site in errors]:
        worst = max(site_errors, key=lambda each: (bool(each.barred), each.gradient))
        clauses.append(f"{low} {error_text(worst, is_inference=program.is_inference)}")
    with_costs = [site for site in row.sites if len(costs.sites.get(site, {})) == 2]
    if with_costs:
        verb = "takes" if objective == "time" else words.needs
        amounts = [
            sum(costs.amount(site, dtype, objective) for site in with_costs)
            for dtype in (program.low, _F32)
        ]
        texts = [
            milliseconds(a) if objective == "time" else f"{a / 2**10:,.3g} KiB" for a in amounts
        ]
        clauses.append(f"{low} {verb} {texts[0]} a {words.run}, float32 {texts[1]}")
    text = "; ".join(clauses)
    return f"{text} ({plural(len(row.sites), 'place')})" if text and len(row.sites) > 1 else text


def error_text(errors: PrecisionErrors, *, is_inference: bool = False) -> str:
    """Return the effect of 16 bits on an operation with these errors, with figures."""
    if errors.barred:
        return f"is excluded: {errors.barred}"
    gradient, loss = _percent(errors.gradient), _percent(errors.loss)
    if is_inference:
        return f"changes outputs by {gradient}, and the metric by {loss}"
    if errors.flushed > 0.1:
        return f"makes {errors.flushed:.0%} of the gradient of {errors.parameter} zero"
    subject = f"the gradient of {errors.parameter}" if errors.parameter else "gradients"
    return f"changes {subject} by {gradient}, and the loss by {loss}"


def _percent(square: float) -> str:
    share = math.sqrt(square)
    return f"{share:.0%}" if share >= 0.1 else f"{100 * share:.2g}%"
