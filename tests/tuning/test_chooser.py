"""The choice is the best one: no assignment of dtypes that keeps to the rules costs less, as trying them all shows."""

from __future__ import annotations

import dataclasses
import itertools
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precast.errors import MissingExtraError
from precast.policy.policy import Rule
from precast.tuning.chooser import choose
from precast.tuning.costs import CallCost, ProgramCosts
from precast.tuning.sites import OperationSite, TensorEdge, TunedProgram
from precast.tuning.tasks import PrecisionErrors
from tests.tuning.programs import F32, LOW, costs_of, programs, total_cost


def _all_choices(program):
    for dtypes in itertools.product((F32, LOW), repeat=len(program.sites)):
        choice = dict(zip(program.sites, dtypes, strict=True))
        if program.settle(choice) == choice:
            yield choice


@pytest.mark.parametrize("is_inference", [False, True])
@pytest.mark.parametrize("objective", ["time", "memory"])
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_no_choice_is_better(objective, is_inference, data):
    program = dataclasses.replace(data.draw(programs()), is_inference=is_inference)
    costs = data.draw(costs_of(program))
    found = choose(program, costs, {}, objective=objective)
    least = min(total_cost(program, costs, choice, objective) for choice in _all_choices(program))
    assert program.settle(found) == found
    assert total_cost(program, costs, found, objective) == pytest.approx(least, abs=1e-9)


def test_a_weight_is_stored_in_16_bits_only_where_all_use_it_so():
    one, two = (
        OperationSite("a", "linear", rule=Rule.LOWER),
        OperationSite("b", "linear", rule=Rule.LOWER),
    )
    edges = tuple(TensorEdge(None, site, 100, dtype=F32, weight="w") for site in (one, two))
    program = TunedProgram((one, two), edges, LOW, "cpu", ("", "a", "b"), is_inference=True)
    costs = ProgramCosts({})
    choice = choose(program, costs, {}, objective="memory")
    assert set(choice.values()) == {LOW}
    assert total_cost(program, costs, choice, "memory") == -200
    held = choose(program, costs, held_back(one), objective="memory")
    assert total_cost(program, costs, held, "memory") == 0
    assert held[one] is F32


ONE = OperationSite("a", "linear", rule=Rule.LOWER)


def _cost(seconds):
    return CallCost(seconds)


TWO = OperationSite("b", "add")
PAIR = TunedProgram((ONE, TWO), (TensorEdge(None, ONE, 100, dtype=F32), TensorEdge(ONE, TWO, 100)))


def _costs(one, two, cast=1.0):
    figures = {100: cast}
    return ProgramCosts(
        {
            ONE: {F32: _cost(one[0]), LOW: _cost(one[1])},
            TWO: {F32: _cost(two[0]), LOW: _cost(two[1])},
        },
        {True: figures, False: figures},
    )


def test_casts_that_cost_more_than_they_save_are_not_made():
    def choice(one, two):
        return choose(PAIR, _costs(one, two), {})

    assert set(choice((3.0, 2.0), (1.0, 1.0)).values()) == {F32}
    assert set(choice((9.0, 2.0), (1.0, 1.0)).values()) == {LOW}
    assert choice((9.0, 2.0), (1.0, 5.0)) == {ONE: LOW, TWO: F32}


def test_a_row_has_to_save_more_than_its_penalty():
    costs = _costs((9.999, 10.0), (10.0, 10.0), cast=0.0)  # float32 is faster by less than 0.1%
    assert choose(PAIR, costs, {})[ONE] is LOW
    assert choose(PAIR, _costs((9.9, 10.0), (10.0, 10.0), cast=0.0), {})[ONE] is F32


def test_an_infinite_error_is_never_accepted():
    assert choose(PAIR, _costs((9.0, 1.0), (9.0, 1.0)), held_back(ONE))[ONE] is F32


def held_back(site):
    """Return the errors of a site that overflows."""
    return {site: PrecisionErrors()}


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_no_choice_within_the_allowed_errors_is_better(data):
    program = data.draw(programs(most=8))
    costs = data.draw(costs_of(program))
    number = st.integers(0, 9).map(float)
    errors = {
        site: PrecisionErrors(loss=data.draw(number), gradient=data.draw(number))
        for site in program.sites
    }
    loss, gradient = data.draw(number), data.draw(number)

    def is_allowed(choice):
        low = [errors[site] for site in program.sites if choice[site] is LOW]
        return sum(e.loss for e in low) <= loss and sum(e.gradient for e in low) <= gradient

    found = choose(program, costs, errors, loss=loss, gradient=gradient)
    totals = [total_cost(program, costs, c) for c in _all_choices(program) if is_allowed(c)]
    if totals:
        assert is_allowed(found)
        assert total_cost(program, costs, found) == pytest.approx(min(totals), abs=1e-9)


def test_a_weight_is_cast_once_for_all_who_use_it():
    sites = tuple(OperationSite(str(i), "linear", rule=Rule.LOWER) for i in range(3))
    edges = tuple(TensorEdge(None, site, 100, dtype=F32, weight="w") for site in sites)
    program = TunedProgram(sites, edges)
    costs = ProgramCosts(
        {site: {F32: _cost(1.0), LOW: _cost(0.0)} for site in sites},
        {True: {100: 1.0}, False: {100: 1.0}},
    )
    choice = choose(program, costs, {})
    assert set(choice.values()) == {LOW}
    assert total_cost(program, costs, choice) == 2.0


def test_what_could_not_be_measured_prefers_neither_dtype():
    assert total_cost(PAIR, ProgramCosts({}), choose(PAIR, ProgramCosts({}), {})) == 0.0


def test_without_scipy_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(MissingExtraError, match=r"precast\.tune needs the package scipy"):
        choose(PAIR, _costs((1.0, 1.0), (1.0, 1.0)), {})
