"""What there was no time to measure is estimated from the same operation at other sizes."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from torch import nn

from precast.policy.policy import Policy
from precast.tuning.costs import distinct_calls, measure
from precast.tuning.estimating import Cost, estimated, in_order, size
from precast.tuning.recording import record
from precast.tuning.sites import Argument, Call, Program
from precast.tuning.timing import Figure

F32, LOW = torch.float32, torch.bfloat16


def _argument(*shape: int, is_weight: bool = False) -> Argument:
    return Argument(
        shape, torch.empty(shape).stride(), F32, -1.0, 1.0, is_weight=is_weight, needs_grad=True
    )


def _linear(rows: int, width: int) -> Call:
    return Call("aten::linear", (_argument(rows, width), _argument(width, width, is_weight=True)))


def _add(count: int) -> Call:
    return Call("aten::add.Tensor", (_argument(count), _argument(count)))


def _costs(seconds: float, kept: int = 0):
    return {dtype: Cost(Figure(seconds), Figure(2 * seconds), kept) for dtype in (F32, LOW)}


def test_the_size_of_a_product_is_its_multiplications() -> None:
    assert size(_linear(8, 64)) == 8 * 64 * 64
    assert size(_add(100)) == 200


def test_the_largest_of_each_operation_is_measured_first() -> None:
    calls = {"a": _add(10), "b": _add(1000), "c": _linear(8, 64), "d": _linear(8, 16)}
    assert in_order(calls, dict.fromkeys(calls, 1)) == ["c", "b", "d", "a"]
    assert in_order(calls, {"a": 500, "b": 1, "c": 1, "d": 1})[2:] == ["a", "d"]


def test_between_two_sizes_an_estimate_is_between_their_costs() -> None:
    calls = {10: _add(10), 100: _add(100), 1000: _add(1000), 1: _add(1)}
    known = {10: _costs(1e-6, 80), 1000: _costs(4e-6, 8000)}
    found = estimated(calls, known)
    assert found.keys() == {100, 1}
    assert found[100][LOW].forward.seconds == pytest.approx(2e-6)
    assert found[100][LOW].backward.seconds == pytest.approx(4e-6)
    assert found[100][LOW].kept == pytest.approx(800, rel=0.01)
    assert found[1][F32].forward.seconds == pytest.approx(1e-6)
    assert found[1][F32].kept == 8


def test_of_an_operation_that_nobody_measured_nothing_is_known() -> None:
    calls = {"a": _add(10), "b": _linear(8, 8)}
    assert not estimated(calls, {"a": _costs(1e-6)})


def _program() -> Program:
    sizes = (8, 32, 16, 64, 8)
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    batch = torch.randn(4, 8)
    return record(nn.Sequential(*layers), lambda model: model(batch).sum(), Policy.load("default"))


def test_without_time_the_largest_call_is_measured_and_the_others_are_estimated() -> None:
    program = _program()
    told: list[str] = []
    costs = measure(
        program,
        rounds=9,
        deadline=time.monotonic(),
        progress=lambda _done, _all, what: told.append(what),
    )
    assert [what for what in told if what.startswith("aten")] == ["aten::linear"]
    linears = [site for site in program.sites if site.op == "linear"]
    largest = max(linears, key=lambda site: size(site.calls[0]))
    assert costs.estimated == {*program.sites} - {largest}
    assert all(costs.seconds(site, F32) > 0 for site in linears)
    [total] = [site for site in program.sites if site.op == "sum"]
    assert total not in costs.sites
    assert len(costs.casts[True]) == 2


def test_with_time_nothing_is_estimated() -> None:
    program = _program()
    assert not measure(program, rounds=2).estimated
    assert len(distinct_calls(program)) == 5
