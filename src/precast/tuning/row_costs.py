"""What the rows of a choice cost, as a part of the integer program that chooses.

For each operation there is one row of the device type, or none, and a rule for each module whose sites do not run as
chosen under it.

Invariants:

- a site needs a rule for its module exactly where `will_do` says that the row of the device type will not do;
- one rule for a module is paid for once, however many operations it is for. Rules for modules around that stand for
  several are not looked for, so the file may have rows that cost less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from precast.policy.policy import Rule
from precast.tuning.sites import Program, Site

__all__ = ["RowCosts"]

_FP32: Final = (Rule.FP32, Rule.FP32_SET_DTYPE, Rule.FP32_APPEND_DTYPE)
_RULES: Final = (Rule.KEEP, Rule.FP32, Rule.LOWER)
_Row = dict[int, float]
_Constraint = tuple[_Row, float, float]


class RowCosts:
    """The variables and constraints of rows.

    Args:
        program: whose sites.
        x: each site's variable, which is 1 in 16 bits.
        variable: adds a variable of this cost, from 0 to 1.
        whole: gets the variables that must be 0 or 1.
    """

    def __init__(
        self,
        program: Program,
        x: Mapping[Site, int],
        variable: Callable[[float], int],
        whole: set[int],
    ) -> None:
        self._program = program
        self._x = x
        self._variable = variable
        self._whole = whole
        self._modules: dict[str, int] = {}

    def constraints(self, hook: float) -> Iterator[_Constraint]:
        """Each constraint: its coefficients, and the least and the most that they may add up to.

        Args:
            hook: what a rule for a module adds to each call of it.
        """
        by_op: dict[str, list[Site]] = {}
        for site in self._program.sites:
            by_op.setdefault(site.op, []).append(site)
        for sites in by_op.values():
            rows = self._rows(sites, hook)
            yield dict.fromkeys(rows.values(), 1.0), 1.0, 1.0
            for site in sites:
                paid = self._paid(site, hook)
                for rule, row in rows.items():
                    for needs, beyond in self._needs(site, rule):
                        yield _sum({row: -1.0}, needs, paid), beyond - 1.0, float("inf")
                if site.pinned and paid is not None:
                    yield {paid: 1.0, rows[None]: 1.0}, 1.0, float("inf")

    def _rows(self, sites: list[Site], hook: float) -> dict[Rule | None, int]:
        """The variables of what the device type may say for an operation; what the base says already is left out."""
        rules = {site.rule for site in sites}
        known = {rule for rule in _RULES if rules <= _alike(rule)}
        found: dict[Rule | None, int] = {None: self._variable(0.0)}
        found |= {rule: self._variable(hook) for rule in _RULES if rule not in known}
        self._whole.update(found.values())
        return found

    def _paid(self, site: Site, hook: float) -> int | None:
        """The variable of the rule for a site's module; None where no module runs it, so that it can have none."""
        name = site.module
        if name is None:
            return None
        if name not in self._modules:
            calls = max(1, self._program.hooks(name))
            self._modules[name] = self._variable(hook * calls)
        return self._modules[name]

    def _needs(self, site: Site, row: Rule | None) -> Iterator[tuple[_Row, float]]:
        """When a row will not do: coefficients and a number that add up to 1 then, and to 0 or less otherwise."""
        rule = site.rule if row is None else row
        x, edges = self._x[site], self._program.inputs(site)
        if any(edge.is_written for edge in edges):
            if not (row is None or rule is Rule.KEEP or rule is site.rule):
                yield {}, 1.0
        elif rule is Rule.LOWER:
            yield ({x: -1.0}, 1.0) if site.casts_down else ({}, 1.0)
        elif rule in _FP32:
            yield {x: 1.0}, 0.0
        else:
            yield from self._of_follower(site, rule)

    def _of_follower(self, site: Site, rule: Rule | None) -> Iterator[tuple[_Row, float]]:
        x, low = self._x[site], self._program.low
        edges = [e for e in self._program.inputs(site) if e.decides or rule is Rule.PROMOTE]
        fixed = {edge.dtype for edge in edges if edge.dtype is not None}
        makers = {e.producer for e in edges if e.dtype is None and e.producer not in (None, site)}
        inputs = [self._x[maker] for maker in makers if maker is not None]
        if not edges or fixed - {low}:
            yield {x: 1.0}, 0.0
            return
        for one in inputs:  # in 16 bits although an input is float32
            yield {x: 1.0, one: -1.0}, 0.0
        if not any(
            edge.producer == site for edge in edges
        ):  # in float32 although all are in 16 bits
            yield {x: -1.0, **dict.fromkeys(inputs, 1.0)}, 1.0 - len(inputs)


def _sum(row: _Row, needs: _Row, paid: int | None) -> _Row:
    """What is paid less a row and what it needs, in coefficients."""
    found = {**row, **{i: -by for i, by in needs.items()}}
    return found if paid is None else {**found, paid: 1.0}


def _alike(rule: Rule) -> set[Rule | None]:
    """The rules that do what this one does."""
    if rule is Rule.KEEP:
        return {None, Rule.KEEP}
    return set(_FP32) if rule is Rule.FP32 else {rule}
