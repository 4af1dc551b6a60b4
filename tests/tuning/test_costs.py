"""Costs are measured once for each kind of call, in turns, and say what is slow, what is fast and what is kept."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch
from torch import nn

from precast.policy.policy import Policy, Rule
from precast.tuning.costs import (
    CallCost,
    ProgramCosts,
    distinct_calls,
    measure_costs,
    time_in_turns,
)
from precast.tuning.recorder import record
from precast.tuning.sites import TENSOR, CallRecord, OperationSite, TensorArgument, TunedProgram

F32, LOW = torch.float32, torch.bfloat16


def _perceptron(layers: int, width: int = 16) -> TunedProgram:
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers))
    )
    batch = torch.randn(4, width)
    return record(model, lambda model: model(batch).sum(), Policy.load("default"))


def test_layers_that_are_alike_are_measured_once():
    assert len(distinct_calls(_perceptron(8).sites)) == len(distinct_calls(_perceptron(3).sites))


def test_progress_is_told_of_each_measurement():
    program, told = _perceptron(2), []
    measure_costs(program, rounds=2, progress=told.append)
    count = len(distinct_calls(program.sites))
    assert told[0] == "casts of 64 elements"
    assert [text.partition(",")[0] for text in told[-count:]] == [
        f"{number} of {count}" for number in range(count)
    ]
    assert any(text.endswith("aten::linear") for text in told)


def test_every_site_has_a_cost_in_both_dtypes():
    program = _perceptron(2)
    costs = measure_costs(program, rounds=2)
    assert set(costs.sites) == set(program.sites)
    for site in program.sites:
        for cost in costs.sites[site].values():
            assert cost.forward > 0
            assert cost.backward > 0


def test_an_operation_that_takes_long_costs_more():
    small, large = _perceptron(1, 8), _perceptron(1, 1536)
    costs = [
        measure_costs(program, rounds=3).amount(program.sites[0], F32, "time")
        for program in (small, large)
    ]
    assert costs[1] > 2 * costs[0]


def test_what_is_called_twice_costs_twice():
    once = _site("aten::tanh", (100,))
    calls = tuple(dataclasses.replace(call, count=2) for call in once.calls)
    twice = OperationSite("other", "tanh", calls=calls)
    costs = measure_costs(TunedProgram((once, twice)), rounds=2)
    one, two = (costs.amount(site, F32, "time") for site in (once, twice))
    assert two == pytest.approx(2 * one)


def _site(op: str, *shapes: tuple[int, ...], grad: bool = True) -> OperationSite:
    tensors = tuple(
        TensorArgument(shape, torch.empty(shape).stride(), F32, -1.0, 1.0, needs_grad=grad)
        for shape in shapes
    )
    call = CallRecord(op, (TENSOR,) * len(shapes), tensors=tensors)
    return OperationSite("", op.partition("::")[2].partition(".")[0], calls=(call,))


def _cost(site: OperationSite, dtype: torch.dtype) -> CallCost:
    return measure_costs(TunedProgram((site,)), rounds=2).sites[site][dtype]


def test_what_autograd_keeps_is_counted_in_bytes_without_weights():
    assert _cost(_site("aten::tanh", (100,)), F32).kept_bytes == 400
    assert _cost(_site("aten::tanh", (100,)), LOW).kept_bytes == 200
    assert _cost(_site("aten::tanh", (100,), grad=False), F32).kept_bytes == 0
    program = record(nn.Linear(8, 4), lambda m: m(torch.ones(2, 8)).sum(), Policy.load("default"))
    assert measure_costs(program, rounds=2).amount(program.sites[0], F32, "memory") == 2 * 8 * 4


def test_without_a_gradient_there_is_no_backward():
    assert _cost(_site("aten::tanh", (100,), grad=False), F32).backward == 0


def test_an_operation_in_place_can_be_measured():
    assert _cost(_site("aten::relu_", (100,)), F32).backward > 0


def test_an_operation_that_16_bits_do_not_have_has_a_cost_in_float32_alone():
    site = _site("aten::linalg_inv", (8, 8))
    costs = measure_costs(TunedProgram((site,)), rounds=2)
    assert set(costs.sites[site]) == {F32}
    assert costs.amount(site, F32, "time") == costs.amount(site, LOW, "time") == 0.0


def test_an_operation_that_refuses_random_numbers_is_missing():
    indices = TensorArgument((3,), (1,), torch.int64, 90, 99)
    [matrix] = _site("aten::x", (4, 4)).calls[0].tensors
    call = CallRecord("aten::index_select", (TENSOR, 0, TENSOR), tensors=(matrix, indices))
    site = OperationSite("", "index_select", calls=(call,))
    assert measure_costs(TunedProgram((site,)), rounds=2).sites == {}


def test_overlapping_strides_are_made_as_they_were():
    expanded = TensorArgument((64, 64), (0, 1), F32, -1.0, 1.0, needs_grad=True)
    call = CallRecord("aten::tanh", (TENSOR,), tensors=(expanded,))
    site = OperationSite("", "tanh", calls=(call,))
    assert _cost(site, F32).forward > 0


def test_a_cast_between_measured_sizes_is_between_their_times():
    costs = ProgramCosts({}, {True: {64: 1.0, 256: 4.0}})
    assert costs.cast(64, down=True) == 1.0
    assert costs.cast(128, down=True) == pytest.approx(2.0)
    assert costs.cast(10, down=True) == 1.0
    assert costs.cast(1024, down=True) == 16.0
    assert costs.cast(0, down=True) == costs.cast(64, down=False) == 0.0


def test_casts_of_the_programs_sizes_are_measured_both_ways():
    program = _perceptron(1, 64)
    costs = measure_costs(program, rounds=2)
    largest = max(edge.elements for edge in program.edges)
    for down in (True, False):
        assert max(costs.casts[down]) >= largest
        assert all(seconds > 0 for seconds in costs.casts[down].values())


def test_measuring_leaves_the_random_state_as_it_was():
    program, state = _perceptron(1), torch.get_rng_state()
    measure_costs(program, rounds=2)
    assert torch.equal(torch.get_rng_state(), state)


def test_turns_are_taken_by_all_in_every_round():
    taken: list[str] = []

    def work(name: str, seconds: float):
        def run() -> float:
            taken.append(name)
            return seconds

        return run

    figures = time_in_turns({"a": work("a", 1.0), "b": work("b", 3.0)}, rounds=2)
    assert figures == {"a": 1.0, "b": 3.0}
    assert taken[4:] == [
        "a",
        "b",
        "b",
        "a",
    ]  # after two calls of each that find out how long it takes


def test_a_checkpoints_second_forward_counts_and_keeps_nothing_until_then():
    call = dataclasses.replace(_site("aten::tanh", (100,)).calls[0], recomputed=1)
    assert _cost(OperationSite("", "tanh", rule=Rule.KEEP, calls=(call,)), F32).kept_bytes == 0


def test_calls_without_time_have_no_cost_and_are_counted():
    program = _perceptron(2)
    costs = measure_costs(program, rounds=2, deadline=time.monotonic())
    assert 0 < costs.skipped < len(program.sites)
    assert len(costs.sites) == len(program.sites) - costs.skipped
    assert "linear" in {site.op for site in costs.sites}  # the one with the most work
