"""The choice is the best one: no assignment of dtypes that keeps to the rules costs less, as trying them all shows."""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from precast.errors import MissingExtraError
from precast.policy.policy import Policy, Rule
from precast.tuning.choosing import Budget, choose, total, usual_choice
from precast.tuning.costs import Cost, Costs
from precast.tuning.fewest_rows import Row, will_do
from precast.tuning.policy_text import written_rows
from precast.tuning.sites import Edge, Program, Site
from precast.tuning.timing import Figure
from tests.tuning.programs import F32, LOW, costs_of, programs


def _all_choices(program):
    for dtypes in itertools.product((F32, LOW), repeat=len(program.sites)):
        choice = dict(zip(program.sites, dtypes, strict=True))
        if program.is_settled(choice):
            yield choice


def _some(data, program, most=4):
    return data.draw(st.sets(st.sampled_from(program.sites), min_size=1, max_size=most))


@pytest.mark.parametrize("is_inference", [False, True])
@pytest.mark.parametrize("objective", ["time", "memory"])
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_no_choice_is_better(objective, is_inference, data):
    program = dataclasses.replace(data.draw(programs()), is_inference=is_inference)
    costs = data.draw(costs_of(program))
    found = choose(program, costs, objective=objective)
    least = min(total(program, costs, choice, objective) for choice in _all_choices(program))
    assert program.is_settled(found.choice)
    assert found.is_proven
    assert found.total == pytest.approx(least, abs=1e-12)
    assert found.total == pytest.approx(total(program, costs, found.choice, objective), abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_no_choice_within_the_budgets_is_better(data):
    program = data.draw(programs(most=8))
    costs = data.draw(costs_of(program))
    errors = st.integers(0, 9).map(float)
    groups = [frozenset(_some(data, program)) for _ in range(3)]
    budget = Budget("loss", {group: data.draw(errors) for group in groups}, data.draw(errors))
    never, held = _some(data, program), _some(data, program, 2)

    def keeps(choice):
        return (
            budget.used(choice) <= budget.limit
            and any(choice[site] is F32 for site in never)
            and all(choice[site] is F32 for site in held)
        )

    found = choose(program, costs, budgets=[budget], never_together=[never], held=held)
    allowed = [total(program, costs, c) for c in _all_choices(program) if keeps(c)]
    assert bool(allowed) == keeps(found.choice)
    if allowed:
        assert found.total == pytest.approx(min(allowed), abs=1e-12)
        assert found.used == {"loss": budget.used(found.choice)}


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_what_differs_from_the_usual_has_to_be_worth_it(data):
    program = data.draw(programs(most=8))
    costs = data.draw(costs_of(program))
    usual, worth = usual_choice(program), data.draw(st.integers(0, 40)) * 1e-6

    def price(choice):
        return total(program, costs, choice) + worth * sum(
            choice[site] is not usual[site] for site in program.sites
        )

    found = choose(program, costs, usual=usual, worth=worth)
    assert price(found.choice) == pytest.approx(min(map(price, _all_choices(program))), abs=1e-12)


def test_what_nothing_is_worth_stays_as_usual():
    usual = usual_choice(PAIR)
    assert usual == {ONE: LOW, TWO: LOW}
    costs = _costs((1.0, 2.0), (1.0, 2.0))
    assert set(choose(PAIR, costs).choice.values()) == {F32}
    assert choose(PAIR, costs, usual=usual, worth=9.0).choice == usual


def test_a_weight_is_stored_in_16_bits_only_where_all_use_it_so():
    one, two = Site("a", "linear", rule=Rule.LOWER), Site("b", "linear", rule=Rule.LOWER)
    edges = tuple(Edge(None, site, 100, dtype=F32, weight="w") for site in (one, two))
    program = Program((one, two), edges, LOW, "cpu", ("", "a", "b"), is_inference=True)
    costs = Costs({})
    found = choose(program, costs, objective="memory")
    assert set(found.choice.values()) == {LOW}
    assert found.total == -200
    held = choose(program, costs, objective="memory", held=[one])
    assert held.total == 0
    assert held.prices[one] == (200 if held.choice[two] is LOW else 0)


def _with_rows(program, costs, choice):
    """What a choice costs with the best rows of the device type, and a rule for each module that needs one."""
    hook, ops = costs.hook, list(dict.fromkeys(site.op for site in program.sites))
    least = math.inf
    for rows in itertools.product((None, Rule.KEEP, Rule.FP32, Rule.LOWER), repeat=len(ops)):
        row_of = dict(zip(ops, rows, strict=True))
        wrong = {
            site.module
            for site in program.sites
            if not will_do(site, row_of[site.op], choice, program)
            or (site.pinned and site.module is not None and row_of[site.op] is not None)
        }
        if None not in wrong:
            calls = sum(program.hooks(module) for module in wrong)
            least = min(least, hook * (calls + sum(row is not None for row in rows)))
    return total(program, dataclasses.replace(costs, hook=0.0), choice) + least


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_what_rules_for_modules_cost_is_counted(data):
    program = data.draw(programs(most=6))
    calls = {name: data.draw(st.integers(1, 3)) for name in program.modules}
    program = dataclasses.replace(program, module_calls=calls)
    hook = data.draw(st.sampled_from([1e-6, 5e-6, 20e-6]))
    costs = dataclasses.replace(data.draw(costs_of(program)), hook=hook)
    found = choose(program, costs)
    least = min(_with_rows(program, costs, choice) for choice in _all_choices(program))
    assert program.is_settled(found.choice)
    assert _with_rows(program, costs, found.choice) == pytest.approx(least, abs=1e-12)


ONE, TWIN = (Site(module, "linear", rule=Rule.LOWER) for module in ("a", "c"))
TWINS = Program(
    (ONE, TWIN),
    tuple(Edge(None, site, 100, dtype=F32) for site in (ONE, TWIN)),
    modules=("", "a", "c"),
    module_calls={"a": 3, "c": 9},
)


@pytest.mark.parametrize(("hook", "dtype"), [(0.1, F32), (0.2, LOW)])
def test_a_rule_for_a_module_has_to_save_more_than_its_hooks_cost(hook, dtype):
    one, other = ({F32: _cost(1.5), LOW: _cost(2.0)}, {F32: _cost(9.0), LOW: _cost(1.0)})
    found = choose(TWINS, Costs({ONE: one, TWIN: other}, hook=hook))
    assert found.choice == {ONE: dtype, TWIN: LOW}
    assert found.total == pytest.approx(1.5 + 1.0 + 3 * hook if dtype is F32 else 2.0 + 1.0)


def test_a_row_of_the_device_type_needs_no_hooks():
    slower = {F32: _cost(1.5), LOW: _cost(2.0)}
    found = choose(TWINS, Costs({ONE: slower, TWIN: slower}, hook=0.5))
    assert set(found.choice.values()) == {F32}
    assert found.total == 1.5 + 1.5 + 0.5
    assert written_rows(found.choice, TWINS, Policy("nothing", {})) == [
        Row(None, "linear", Rule.KEEP, (ONE, TWIN))
    ]


def _cost(seconds):
    return Cost(Figure(seconds))


TWO = Site("b", "add")
PAIR = Program((ONE, TWO), (Edge(None, ONE, 100, dtype=F32), Edge(ONE, TWO, 100)))


def _costs(one, two, cast=1.0):
    figures = {100: Figure(cast)}
    return Costs(
        {
            ONE: {F32: _cost(one[0]), LOW: _cost(one[1])},
            TWO: {F32: _cost(two[0]), LOW: _cost(two[1])},
        },
        {True: figures, False: figures},
    )


def test_casts_that_cost_more_than_they_save_are_not_made():
    assert set(choose(PAIR, _costs((3.0, 2.0), (1.0, 1.0))).choice.values()) == {F32}
    assert set(choose(PAIR, _costs((9.0, 2.0), (1.0, 1.0))).choice.values()) == {LOW}
    found = choose(PAIR, _costs((9.0, 2.0), (1.0, 5.0)))
    assert found.choice == {ONE: LOW, TWO: F32}
    assert (
        found.total == 2.0 + 1.0 + 2.0 + 2.0
    )  # both sites, and a cast with that of the gradient back on each edge


def test_what_a_site_in_float32_would_save_is_its_price():
    found = choose(PAIR, _costs((9.0, 2.0), (9.0, 2.0)), held=[TWO])
    assert found.choice == {ONE: LOW, TWO: F32}
    assert found.prices == {TWO: 9.0 - 2.0 + 2.0}


def test_an_error_that_is_not_finite_is_never_taken():
    budget = Budget("loss", {frozenset({ONE}): math.inf}, 1e9)
    assert choose(PAIR, _costs((9.0, 1.0), (9.0, 1.0)), budgets=[budget]).choice[ONE] is F32


def test_a_weight_is_cast_once_for_all_who_use_it():
    sites = tuple(Site(str(i), "linear", rule=Rule.LOWER) for i in range(3))
    edges = tuple(Edge(None, site, 100, dtype=F32, weight="w") for site in sites)
    program = Program(sites, edges)
    costs = Costs(
        {site: {F32: _cost(1.0), LOW: _cost(0.0)} for site in sites},
        {True: {100: Figure(1.0)}, False: {100: Figure(1.0)}},
    )
    assert choose(program, costs).total == 2.0


def test_what_could_not_be_measured_prefers_neither_dtype():
    assert choose(PAIR, Costs({})).total == 0.0


def test_a_thousand_modules_take_seconds():
    sites = tuple(Site(f"{i}", "linear", rule=Rule.LOWER if i % 3 else None) for i in range(3000))
    edges = tuple(
        Edge(sites[i - step] if i >= step else None, site, 100, dtype=None if i >= step else F32)
        for i, site in enumerate(sites)
        for step in (1, 2)
    )
    program = Program(sites, edges)
    draw = torch.Generator().manual_seed(0)
    times = torch.rand(3000, 2, generator=draw).tolist()
    known = {
        s: {F32: _cost(one), LOW: _cost(other)}
        for s, (one, other) in zip(sites, times, strict=True)
    }
    costs = Costs(known, {True: {100: Figure(0.1)}, False: {100: Figure(0.1)}})
    errors = {frozenset({site}): time[0] for site, time in zip(sites, times, strict=True)}
    found = choose(program, costs, budgets=[Budget("loss", errors, 300.0)], seconds=30.0)
    assert found.used["loss"] <= 300.0 + 1e-6
    assert found.total < total(program, costs, program.choose())


def test_without_scipy_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(
        MissingExtraError, match=r"precast\.tune needs the package scipy.*precast\[tune\]"
    ):
        choose(PAIR, _costs((1.0, 1.0), (1.0, 1.0)))
