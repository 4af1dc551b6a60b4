"""The policy that carries out a choice of dtypes: its rows, and a reason with figures for each.

Invariants:
- under the policy each operation runs in the chosen dtype, in a region of the program's 16-bit dtype, as far as that
  follows from the dtypes of its inputs; under `explicit_policy` always;
- a row of a module is written only for a module whose own operation needs it. A row of the device type, which needs no
  hooks, replaces rows of modules where that makes fewer;
- modules with the same rows, whose names differ in one component, share a pattern.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from precast.errors import PolicyError
from precast.policy.module_plan import outwards
from precast.policy.policy import TUNED, Policy, Rule
from precast.policy.rows import FLOAT32_RULES
from precast.tuning.sites import DtypeChoice, OperationSite, TunedProgram

__all__ = ["PolicyRow", "explicit_policy", "fulfills", "policy_of", "rows_of", "with_patterns"]

_F32: Final = torch.float32
_RULES: Final = (Rule.FP32, Rule.KEEP, Rule.LOWER)
"""The rules of rows. The first that suffices is taken, so an operation that is excluded from 16 bits has "fp32"."""


@dataclass(frozen=True)
class PolicyRow:
    """One row of a policy, and the operations that it decides for.

    `place` is the module's name, or a pattern of several; None for a row of the device type.
    """

    place: str | None
    op: str
    rule: Rule
    sites: tuple[OperationSite, ...]


def policy_of(
    choice: DtypeChoice,
    program: TunedProgram,
    base: Policy,
    *,
    reason: Callable[[PolicyRow], str] = lambda _: "",
) -> Policy:
    """Return the policy that carries out a settled choice; `reason` tells why a row is needed, with figures."""
    rows = with_patterns(rows_of(choice, program), program.modules)
    return _with_rows(base, rows, program, reason)


def explicit_policy(choice: DtypeChoice, program: TunedProgram, base: Policy) -> Policy:
    """Return the policy that carries out a settled choice with a row for every site, so that none is a prediction."""
    rows = []
    for site in program.sites:
        is_low = choice[site] is program.low
        rules = [Rule.KEEP, Rule.LOWER] if is_low else [Rule.FP32, Rule.KEEP]
        if site.rule is not None and (is_low or site.rule is not Rule.KEEP):
            rules.insert(0, site.rule)
        rule = next(rule for rule in rules if fulfills(site, rule, choice, program))
        rows.append(PolicyRow(site.module, site.op, rule, (site,)))
    return _with_rows(base, rows, program, lambda _: "")


def _with_rows(
    base: Policy,
    rows: Iterable[PolicyRow],
    program: TunedProgram,
    reason: Callable[[PolicyRow], str],
) -> Policy:
    if base.modules:
        raise PolicyError(
            f"the base {base.name!r} has rules for modules, which rows for the modules of a choice would change. "
            "Start from a policy without [modules], such as 'default'."
        )
    modules: dict[str, dict[str, Any]] = {}
    device_rows: dict[str, Any] = {}
    for row in rows:
        place_rows = device_rows if row.place is None else modules.setdefault(row.place, {})
        why = reason(row)
        place_rows[row.op] = {"rule": str(row.rule), "reason": why} if why else row.rule
    return base.replace(
        name=TUNED,
        ops={program.device: device_rows},
        modules={name: {"ops": place_rows} for name, place_rows in modules.items()},
    )


def fulfills(
    site: OperationSite, row: Rule | None, choice: DtypeChoice, program: TunedProgram
) -> bool:
    """Return True if an operation runs in the chosen dtype under a row; None leaves the base's rule."""
    rule = site.rule if row is None else row
    edges = program.inputs(site)
    if any(edge.is_written for edge in edges):  # it has the dtype of the tensor that it writes to
        return row is None or rule is Rule.KEEP or rule is site.rule
    if rule is Rule.LOWER:
        return site.casts_down and choice[site] is program.low
    if rule in FLOAT32_RULES:
        return choice[site] is _F32
    deciding = {e.dtype_under(choice) for e in edges if e.decides or rule is Rule.PROMOTE}
    if len(deciding) > 1 and sum(call.count for call in site.calls) > 1:
        return False  # one of its calls may have 16-bit inputs alone
    return choice[site] is (program.low if deciding == {program.low} else _F32)


def rows_of(choice: DtypeChoice, program: TunedProgram) -> list[PolicyRow]:
    """Return the rows that a settled choice needs, those of the device type first, then in the order of modules."""
    by_op: dict[str, list[OperationSite]] = {}
    for site in program.sites:
        by_op.setdefault(site.op, []).append(site)
    order = {name: i for i, name in enumerate(program.modules)}
    rows: list[PolicyRow] = []
    for op, sites in by_op.items():
        sites.sort(key=lambda site: order.get(site.module or "", 0))
        candidates = [_places(rule, sites, choice, program) for rule in (None, *_RULES)]
        # Rows of modules need hooks.
        places = min(
            [each for each in candidates if each is not None],
            key=lambda each: (sum(place is not None for place in each), len(each)),
        )
        governed: dict[str | None, list[OperationSite]] = {}
        for site in sites:
            governed.setdefault(_nearest(site.module, places), []).append(site)
        rows += [
            PolicyRow(place, op, rule, tuple(governed.get(place, ())))
            for place, rule in places.items()
        ]
    return sorted(rows, key=lambda row: -1 if row.place is None else order.get(row.place, 0))


def _places(
    device_rule: Rule | None,
    sites: Sequence[OperationSite],
    choice: DtypeChoice,
    program: TunedProgram,
) -> dict[str | None, Rule] | None:
    """Return the rules of one operation by place, from the outer modules to the inner ones; None if none suffice.

    `device_rule` is the rule of the row of the device type; None for no such row. A row of any module may reach pinned
    operations or not, so they have rows of their own.
    """
    places: dict[str | None, Rule] = {} if device_rule is None else {None: device_rule}
    needs_modules = not all(fulfills(site, device_rule, choice, program) for site in sites)
    for site in sites:
        inherited = places.get(_nearest(site.module, places))
        is_pinned = needs_modules and site.pinned and site.module is not None
        if not is_pinned and fulfills(site, inherited, choice, program):
            continue
        if site.module is None:
            return None
        places[site.module] = next(r for r in _RULES if fulfills(site, r, choice, program))
    return places


_NOWHERE: Final = "\0"


def _nearest(module: str | None, places: Mapping[str | None, Rule]) -> str | None:
    """Return the place of the row that decides for an operation of a module; `_NOWHERE` if there is none."""
    around = (module, *outwards(module), None) if module is not None else (None,)
    return next((place for place in around if place in places), _NOWHERE)


def with_patterns(rows: Sequence[PolicyRow], modules: Sequence[str]) -> list[PolicyRow]:
    """Merge the rows of modules with the same rows, whose names differ in one component, into a pattern.

    A pattern matches no other of the `modules`; those of the most modules come first.
    """
    contents: dict[str, set[tuple[str, Rule]]] = {}
    for row in rows:
        if row.place is not None:
            contents.setdefault(row.place, set()).add((row.op, row.rule))
    matches: dict[str, list[str]] = {}
    for name in modules:
        for pattern in _with_stars(name):
            matches.setdefault(pattern, []).append(name)
    merged: dict[str, str] = {}
    for pattern, names in sorted(matches.items(), key=lambda each: -len(each[1])):
        rules = [contents.get(name) for name in names]
        is_same = len(names) > 1 and rules[0] is not None and rules.count(rules[0]) == len(rules)
        if is_same and not merged.keys() & names and pattern not in merged.values():
            merged |= dict.fromkeys(names, pattern)
    result: dict[tuple[str | None, str, Rule], PolicyRow] = {}
    for row in rows:
        place = merged.get(row.place, row.place) if row.place is not None else None
        key = place, row.op, row.rule
        earlier = result.get(key, PolicyRow(*key, ()))
        result[key] = replace(earlier, sites=earlier.sites + row.sites)
    return list(result.values())


def _with_stars(name: str) -> Iterator[str]:
    """Yield the name with each of its components replaced by a star."""
    parts = name.split(".") if name else []
    for i in range(len(parts)):
        yield ".".join([*parts[:i], "*", *parts[i + 1 :]])
