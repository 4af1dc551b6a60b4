"""Writes a choice as a policy: a long form with a row for each site, and the shortest file, with a reason for each row.

Invariants:

- under either form each site runs in the dtype that the choice gives it, in a region of the program's 16-bit dtype;
- rows for an operation of a module are in the rule of the module that calls it, or of one around it; those for
  operations that no module of the model runs are rows for the device type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import tomli_w

from precast.errors import PolicyError
from precast.policy import toml_file
from precast.policy.module_rules import ModuleRule
from precast.policy.policy import TUNED, Policy, Rule
from precast.policy.rows import Entry, canonical
from precast.policy.toml_file import PolicyContents
from precast.tuning.fewest_rows import Row, fewest_rows, will_do
from precast.tuning.sites import Choice, Program, Site

__all__ = ["policy_of", "short_policy", "text_of", "with_patterns", "written_rows"]

_HEAD: Final = 3  # lines of a rendered policy before its tables: name, summary, mixed


def policy_of(choice: Choice, program: Program, base: Policy) -> Policy:
    """The policy that carries out a choice, in its long form: with a row for every site.

    Args:
        choice: for every site of the program, float32 or the program's 16-bit dtype; see `Program.settle`.
        program: what the choice is about.
        base: the policy that holds for all else.

    Raises:
        PolicyError: the choice is not settled, or the base has rules for modules.
    """
    _check(choice, program, base)
    rows = [
        Row(site.module, site.op, _rule(site, choice, program), (site,)) for site in program.sites
    ]
    return _policy(rows, program, base)


def short_policy(
    choice: Choice,
    program: Program,
    base: Policy,
    *,
    reason: Callable[[Row], str] = lambda _: "",
) -> Policy:
    """The same with the fewest rows.

    Args:
        choice: as `policy_of`.
        program: as `policy_of`.
        base: as `policy_of`.
        reason: says why a row is there, with figures.

    Raises:
        PolicyError: as `policy_of`.
    """
    return _policy(written_rows(choice, program, base), program, base, reason)


def written_rows(choice: Choice, program: Program, base: Policy) -> list[Row]:
    """The rows of the shortest file; one for several modules has a pattern with a star.

    Raises:
        PolicyError: as `policy_of`.
    """
    _check(choice, program, base)
    return with_patterns(fewest_rows(choice, program), program.modules)


def text_of(
    choice: Choice,
    program: Program,
    base: str,
    *,
    reason: Callable[[Row], str] = lambda _: "",
    header: Sequence[str] = (),
) -> str:
    """The shortest file that carries out a choice.

    Args:
        choice: for every site of the program, its dtype.
        program: what the choice is about.
        base: the name of a preset or the path of a file, which the file starts from.
        reason: says why a row is there, with figures.
        header: lines on where and how this was found; they become comments.

    Raises:
        PolicyError: as `policy_of`.
    """
    rows = written_rows(choice, program, Policy.load(base))
    outside = {canonical(row.op): Entry(row.rule, reason(row)) for row in rows if row.place is None}
    modules: dict[str, dict[str, Entry]] = {}
    for row in rows:
        if row.place is not None:
            entry = Entry(row.rule, reason(row))
            modules.setdefault(row.place, {})[canonical(row.op)] = entry
    contents = PolicyContents(
        tables={program.device: outside} if outside else {},
        modules={place: ModuleRule(None, entries) for place, entries in modules.items()},
    )
    body = toml_file.render(contents).splitlines()[_HEAD:]
    lines = [f"# {line}".rstrip() for text in header for line in text.splitlines()]
    lines += [f'name = "{TUNED}"', tomli_w.dumps({"base": base}).strip()]
    return "\n".join([*lines, *(line for line in body if not line.startswith("#"))]) + "\n"


def _check(choice: Choice, program: Program, base: Policy) -> None:
    if base.modules:
        raise PolicyError(
            f"the base {base.name!r} has rules for modules, beside which rows for the modules of a choice would not "
            "mean what they say. Start from a policy without [modules], such as 'default'."
        )
    if program.is_settled(choice):
        return
    settled = program.settle(choice)
    wrong = [site for site in program.sites if choice.get(site) is not settled[site]]
    raise PolicyError(
        f"no policy can carry out this choice: {wrong[0]} and {len(wrong) - 1} other sites cannot run as it says. "
        "Use program.settle(choice)."
    )


def _rule(site: Site, choice: Choice, program: Program) -> Rule:
    """The rule that makes a site run as chosen; the base's if that does."""
    tried = [Rule.KEEP, Rule.LOWER] if choice[site] is program.low else [Rule.FP32, Rule.KEEP]
    if site.rule is not None and (choice[site] is program.low or site.rule is not Rule.KEEP):
        tried.insert(0, site.rule)
    return next(rule for rule in tried if will_do(site, rule, choice, program))


def _policy(
    rows: Sequence[Row],
    program: Program,
    base: Policy,
    reason: Callable[[Row], str] = lambda _: "",
) -> Policy:
    modules: dict[str, dict[str, Any]] = {}
    outside: dict[str, Any] = {}
    for row in rows:
        of_place = outside if row.place is None else modules.setdefault(row.place, {})
        why = reason(row)
        of_place[row.op] = {"rule": str(row.rule), "reason": why} if why else row.rule
    return base.replace(
        name=TUNED,
        ops={program.device: outside},
        modules={name: {"ops": rows} for name, rows in modules.items()},
    )


# --- one row for several modules ---


def with_patterns(rows: Sequence[Row], modules: Sequence[str]) -> list[Row]:
    """The rows with those of modules that say the same, and whose names differ in one component, as one pattern.

    Args:
        rows: the rows, each for a module or the device type.
        modules: the names of all modules of the model.
    """
    says: dict[str, list[Row]] = {}
    for row in rows:
        if row.place is not None:
            says.setdefault(row.place, []).append(row)
    merged: dict[str, str] = {}
    taken: set[str] = set()
    for pattern, matched in _patterns(says, modules):
        if not matched & merged.keys() and pattern not in taken:
            merged |= dict.fromkeys(matched, pattern)
            taken.add(pattern)
    found: dict[tuple[str | None, str, Rule], Row] = {}
    for row in rows:
        place = merged.get(row.place, row.place) if row.place is not None else None
        key = place, row.op, row.rule
        known = found.get(key, Row(place, row.op, row.rule, ()))
        found[key] = replace(known, sites=known.sites + row.sites)
    return list(found.values())


def _patterns(
    says: dict[str, list[Row]], modules: Sequence[str]
) -> list[tuple[str, frozenset[str]]]:
    """Patterns that match modules of one meaning and no others, those for the most modules first."""
    matched: dict[str, list[str]] = {}
    for name in modules:
        for pattern in _starred(name):
            matched.setdefault(pattern, []).append(name)
    meaning = {name: frozenset((row.op, row.rule) for row in rows) for name, rows in says.items()}
    found = [
        (pattern, frozenset(names))
        for pattern, names in matched.items()
        if len(names) > 1 and len({meaning.get(name) for name in names}) == 1 and names[0] in says
    ]
    return sorted(found, key=lambda each: -len(each[1]))


def _starred(name: str) -> list[str]:
    """The name with each of its components replaced by a star."""
    parts = name.split(".") if name else []
    return [".".join([*parts[:i], "*", *parts[i + 1 :]]) for i in range(len(parts))]
