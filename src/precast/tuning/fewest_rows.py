"""Finds the fewest rows of a policy under which every site runs as chosen.

Rows of a module hold in the modules inside it too, so one row for a module may stand for many sites. For each operation
the modules are a tree, and the best place of its rows is found by dynamic programming: what the subtree of a module
costs depends on the rows below it, and on the rule that it inherits, and on nothing else.

Invariants:

- what a site runs in depends on its rule and the dtypes of its inputs, which are as chosen. So whether a rule will do
  is known for each site alone (`will_do`);
- a pinned site of a module, which rules for modules around may not reach, has a row of its own wherever its operation
  has rows;
- no row can be left out. Each call that a rule for a module makes slower counts as much as a row, so rows of the
  device type, which need no hooks, are taken where they do; else rows are as close as possible to the sites.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from precast.policy.module_plan import outwards
from precast.policy.policy import Rule
from precast.tuning.sites import Choice, Program, Site

__all__ = ["Row", "dtype_under", "fewest_rows", "will_do"]

_F32: Final = torch.float32
_FP32: Final = (Rule.FP32, Rule.FP32_SET_DTYPE, Rule.FP32_APPEND_DTYPE)
_RULES: Final = (None, Rule.KEEP, Rule.FP32, Rule.LOWER)
"""What a row may say, the least that it does first; None is no row."""
_ROW: Final = 1.0
_PLACE: Final = 1e-6
"""What a row costs for each level that it stands above the deepest module."""


@dataclass(frozen=True)
class Row:
    """One row of a policy.

    Attributes:
        place: the module's name, or the pattern of several; None for the rows of the device type.
        op: the operation.
        rule: the rule.
        sites: those that it is the nearest row of.
    """

    place: str | None
    op: str
    rule: Rule
    sites: tuple[Site, ...]


def dtype_under(
    rule: Rule | None, inputs: Sequence[tuple[torch.dtype, bool]], low: torch.dtype
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
    deciding = {dtype for dtype, decides in inputs if decides or rule is Rule.PROMOTE}
    return low if deciding == {low} else _F32


def will_do(site: Site, row: Rule | None, choice: Choice, program: Program) -> bool:
    """Whether a site runs as chosen if the nearest row says so; None where there is none, so that the base decides."""
    rule = site.rule if row is None else row
    edges = program.inputs(site)
    if any(edge.is_written for edge in edges):  # it has the dtype of what it writes to
        return row is None or rule is Rule.KEEP or rule is site.rule
    if rule is Rule.LOWER and not site.casts_down:
        return False
    inputs = [(edge.dtype_under(choice), edge.decides) for edge in edges]
    return dtype_under(rule, inputs, program.low) is choice[site]


def fewest_rows(choice: Choice, program: Program) -> list[Row]:
    """The rows, those of the device type first, then by module in the model's order.

    Args:
        choice: a settled choice.
        program: what it is about.
    """
    by_op: dict[str, list[Site]] = {}
    for site in program.sites:
        by_op.setdefault(site.op, []).append(site)
    rows = [row for op, sites in by_op.items() for row in _rows_of(op, sites, choice, program)]
    order = {name: i for i, name in enumerate(program.modules)}
    return sorted(rows, key=lambda row: -1 if row.place is None else order.get(row.place, 0))


def _rows_of(op: str, sites: list[Site], choice: Choice, program: Program) -> Iterator[Row]:
    if all(will_do(site, None, choice, program) for site in sites):
        return
    tree = _Tree(sites, choice, program)
    placed = tree.placed()
    governed: dict[str | None, list[Site]] = {}
    for site in sites:
        place = _nearest(site, placed)
        if place != _NOWHERE:
            governed.setdefault(place, []).append(site)
    for place, rule in placed.items():
        yield Row(place, op, rule, tuple(governed.get(place, ())))


_NOWHERE: Final = "\0"


def _nearest(site: Site, placed: Mapping[str | None, Rule]) -> str | None:
    """Where the row that decides for a site stands."""
    return next((place for place in _places(site.module) if place in placed), _NOWHERE)


def _places(module: str | None) -> Iterator[str | None]:
    """Where rows for an operation of a module may stand, the nearest first."""
    if module is not None:
        yield module
        yield from outwards(module)
    yield None


class _Tree:
    """The modules in which one operation runs, and those around them."""

    def __init__(self, sites: list[Site], choice: Choice, program: Program) -> None:
        self._sites = {site.module: site for site in sites}
        self._choice = choice
        self._program = program
        self._inside: dict[str | None, list[str | None]] = {None: []}
        self._link(sites)
        self._deepest = max(map(_depth, self._inside))
        self._best: dict[tuple[str | None, Rule | None], tuple[float, Rule | None]] = {}
        self._solve()

    def placed(self) -> dict[str | None, Rule]:
        """Place -> the row that stands there."""
        found: dict[str | None, Rule] = {}
        waiting: list[tuple[str | None, Rule | None]] = [(None, None)]
        while waiting:
            place, inherited = waiting.pop()
            _, own = self._best[place, inherited]
            if own is not None:
                found[place] = own
            waiting += [(inner, own or inherited) for inner in self._inside[place]]
        return found

    def _link(self, sites: list[Site]) -> None:
        """Links every module to the one around it, also where the way to it broke off."""
        self._inside = {None: []}
        for site in sites:
            places = list(_places(site.module))[::-1]
            for outer, inner in itertools.pairwise(places):
                if inner not in self._inside:
                    self._inside[inner] = []
                    self._inside[outer].append(inner)

    def _solve(self) -> None:
        for place in sorted(self._inside, key=_depth, reverse=True):
            for inherited in _RULES:
                self._best[place, inherited] = min(
                    ((self._cost(place, inherited, own), own) for own in _RULES),
                    key=lambda found: found[0],
                )

    def _cost(self, place: str | None, inherited: Rule | None, own: Rule | None) -> float:
        """What the rows in a subtree cost, if its root has a row or inherits one."""
        row = own or inherited
        site = self._sites.get(place)
        if site is not None:
            if site.pinned and place is not None and own is None:
                return float("inf")
            if not will_do(site, row, self._choice, self._program):
                return float("inf")
        cost = sum(self._best[inner, row][0] for inner in self._inside[place])
        if own is None:
            return cost
        hooks = self._program.hooks(place)
        return cost + _ROW * (1 + hooks) + self._height(place) * _PLACE

    def _height(self, place: str | None) -> float:
        """How far above the deepest module a place is; the rows of the device type come before those of the model."""
        return self._deepest - _depth(place) + (1.5 if place == "" else 0.0)


def _depth(place: str | None) -> int:
    if place is None:
        return 0
    return 1 if place == "" else 2 + place.count(".")
