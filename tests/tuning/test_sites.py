"""A choice that can be carried out stays; one that cannot becomes one that can."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from precast.policy.policy import Rule
from precast.tuning.sites import OperationSite, TensorEdge, TunedProgram

F32, LOW = torch.float32, torch.bfloat16

FIRST = OperationSite("first", "linear", rule=Rule.LOWER)
NORM = OperationSite("norm", "native_batch_norm", casts_down=False)
RELU = OperationSite("", "relu_")
LOG = OperationSite("", "log", barred="it has no kernel for float16")
LAST = OperationSite("last", "linear", rule=Rule.LOWER)
PROGRAM = TunedProgram(
    sites=(FIRST, NORM, RELU, LOG, LAST),
    edges=(
        TensorEdge(None, FIRST, 64, dtype=F32),
        TensorEdge(FIRST, NORM, 64),
        TensorEdge(None, NORM, 8, dtype=F32, weight="norm.weight", decides=False),
        TensorEdge(NORM, RELU, 64, is_written=True),
        TensorEdge(NORM, LOG, 64),
        TensorEdge(LOG, LAST, 64),
    ),
    modules=("", "first", "norm", "last"),
)


def _low(choice):
    return {site for site in PROGRAM.sites if choice[site] is LOW}


def test_sites_are_the_same_whatever_is_known_of_them():
    assert OperationSite("a", "add", rule=Rule.LOWER, barred="no") == OperationSite("a", "add")
    assert len({OperationSite("a", "add", pinned=True), OperationSite("a", "add")}) == 1
    assert OperationSite("a", "add") != OperationSite(None, "add")


def test_all_that_can_be_in_16_bits_is():
    assert _low(PROGRAM.choose(PROGRAM.sites)) == {FIRST, NORM, RELU, LAST}


def test_what_is_barred_stays_in_float32():
    assert _low(PROGRAM.choose([LOG])) == set()


def test_what_must_not_be_cast_down_follows_its_inputs():
    assert _low(PROGRAM.choose([NORM])) == set()
    assert _low(PROGRAM.choose([NORM, FIRST])) == {FIRST, NORM, RELU}


def test_an_operation_in_place_has_the_dtype_of_what_it_writes_to():
    assert _low(PROGRAM.choose([RELU])) == set()
    assert RELU in _low(PROGRAM.choose([FIRST, NORM]))


def test_what_a_barred_operation_writes_to_is_in_float32():
    barred = OperationSite("", "relu_", barred="it overflows")
    sites = tuple(barred if site == RELU else site for site in PROGRAM.sites)
    program = TunedProgram(sites, PROGRAM.edges)
    assert program.choose(sites)[NORM] is F32
    assert program.choose(sites)[barred] is F32


@given(st.sets(st.sampled_from(PROGRAM.sites)))
def test_a_settled_choice_stays_as_it_is(low):
    choice = PROGRAM.choose(low)
    assert PROGRAM.settle(choice) == choice
