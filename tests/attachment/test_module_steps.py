"""Modules whose forward is a generator or a coroutine follow their rule in each step, and their callers do not."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import precast
from precast.errors import PolicyError
from precast.policy.policy import Policy

Region = Callable[[], AbstractContextManager[Any]]
X = torch.ones(1, 2)
FULL, BRAIN, HALF = torch.float32, torch.bfloat16, torch.float16


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)


class Steps(Layer):
    def forward(self, x: Tensor) -> Generator[Tensor, Tensor | None, Tensor]:
        try:
            sent = yield self.inner(x)
        except KeyError:
            sent = yield self.inner(x)
        yield self.inner(X if sent is None else sent)
        return self.inner(x)


class Lazily(Layer):
    """A plain forward whose result is yet to run."""

    def forward(self, *many: Tensor) -> Iterator[Tensor]:
        return (self.inner(x) for x in many)


class Waits(Layer):
    async def forward(self, x: Tensor) -> tuple[Tensor, bool]:
        before = self.inner(x)
        await asyncio.sleep(0)
        return before, self.inner(x).dtype is before.dtype


class Streams(Layer):
    async def forward(self, x: Tensor) -> AsyncIterator[Tensor]:
        yield self.inner(x)


class Hands(nn.Module):
    def forward(self, given: Iterator[Any]) -> Iterator[Any]:
        return given


@pytest.fixture(params=["precast", "torch"])
def region(request: pytest.FixtureRequest) -> Region:
    of = precast.autocast if request.param == "precast" else torch.autocast
    return lambda: of("cpu", dtype=torch.bfloat16)


def ruled(model: nn.Module, rule: object) -> Any:
    return precast.attach(model, Policy.load("torch").replace(modules={"": rule}))


def here() -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


RULES = {"fp32": FULL, "float16": HALF, "lower": BRAIN}


@pytest.mark.parametrize("rule", RULES)
def test_each_step_of_a_generator_follows_the_rule_and_its_caller_does_not(
    rule: str, region: Region
) -> None:
    model = Steps()
    with ruled(model, rule), region():
        steps = model(X)
        assert here() == (True, BRAIN)
        dtypes = []
        while True:
            try:
                dtypes.append(next(steps).dtype)
            except StopIteration as end:
                dtypes.append(end.value.dtype)
                break
            assert here() == (True, BRAIN)
            assert model.inner(X).dtype is BRAIN
    assert dtypes == [RULES[rule]] * 3


def test_what_is_sent_is_cast_as_an_input_is(region: Region) -> None:
    model = Steps()
    with ruled(model, "fp32"), region():
        steps = model(X.bfloat16())
        next(steps)
        assert steps.send(X.half()).dtype is FULL


def test_what_is_thrown_arrives_under_the_rule(region: Region) -> None:
    model = Steps()
    with ruled(model, "fp32"), region():
        steps = model(X)
        next(steps)
        assert steps.throw(KeyError()).dtype is FULL
        with pytest.raises(ZeroDivisionError):
            steps.throw(ZeroDivisionError())
        assert here() == (True, BRAIN)
        left = model(X)
        next(left)
        left.close()
        assert here() == (True, BRAIN)


def test_generators_that_take_turns_do_not_see_each_other(region: Region) -> None:
    first, second = Steps(), Steps()
    with ruled(first, "fp32"), ruled(second, "float16"), region():
        pairs = [(a.dtype, b.dtype) for a, b in zip(first(X), second(X), strict=True)]
    assert pairs == [(FULL, HALF)] * 2


def test_a_result_that_is_yet_to_run_follows_the_rule(region: Region) -> None:
    model = Lazily()
    with ruled(model, "fp32"), region():
        assert [y.dtype for y in model(X, X)] == [FULL, FULL]


def test_a_generator_that_is_only_handed_on_is_left_alone(region: Region) -> None:
    model = Hands()
    with ruled(model, "fp32"), region():
        given = (here() for _ in range(2))
        assert model(given) is given
        assert list(given) == [(True, BRAIN)] * 2


@pytest.mark.parametrize("rule", RULES)
def test_a_coroutine_follows_the_rule_while_it_runs(rule: str, region: Region) -> None:
    model = Waits()

    async def two_at_once() -> list[tuple[Tensor, bool]]:
        assert here() == (True, BRAIN)
        return await asyncio.gather(model(X), model(X))

    with ruled(model, rule), region():
        results = asyncio.run(two_at_once())
        assert here() == (True, BRAIN)
    assert [(tensor.dtype, same) for tensor, same in results] == [(RULES[rule], True)] * 2


def test_what_comes_out_where_autocast_is_off_is_float32(region: Region) -> None:
    model = nn.ModuleDict({"steps": Steps()})

    def forward(x: Tensor) -> list[torch.dtype]:
        return [y.dtype for y in model["steps"](x)]

    model.forward = forward  # type: ignore[method-assign,assignment]
    rules = Policy.load("torch").replace(modules={"": "fp32", "steps": "bfloat16"})
    with precast.attach(model, rules), region():
        assert model(X) == [FULL, FULL]


def test_outside_of_a_region_nothing_changes() -> None:
    model = Steps()
    with ruled(model, "float16"):
        assert [y.dtype for y in model(X)] == [FULL, FULL]


def test_a_generator_that_outlives_the_attachment_follows_no_rule(region: Region) -> None:
    model = Steps()
    attachment = ruled(model, "fp32")
    with region():
        steps = model(X)
        assert next(steps).dtype is FULL
        attachment.detach()
        assert next(steps).dtype is BRAIN


def test_a_copy_of_the_model_follows_the_rule(region: Region) -> None:
    model = Steps()
    with ruled(model, "fp32"):
        other = copy.deepcopy(model)
    with region():
        assert [y.dtype for y in other(X)] == [FULL, FULL]


def test_gradients_of_a_step_are_those_of_float32(region: Region) -> None:
    model = Steps()
    with ruled(model, "fp32"), region():
        loss = sum(y.sum() for y in model(X))
    loss.backward()  # type: ignore[union-attr]
    assert model.inner.weight.grad is not None
    assert torch.equal(model.inner.weight.grad, torch.full((2, 2), 2.0))


def test_a_compiled_model_gives_the_same(region: Region) -> None:
    model = nn.ModuleDict({"steps": Steps(), "head": nn.Linear(2, 2)})

    def forward(x: Tensor) -> tuple[list[torch.dtype], Tensor]:
        return [y.dtype for y in model["steps"](x)], model["head"](x)

    model.forward = forward  # type: ignore[method-assign,assignment]
    rules = Policy.load("torch").replace(modules={"steps": "fp32"})
    with precast.attach(model, rules), region():
        dtypes, head = torch.compile(model, backend="eager")(X)
    assert (dtypes, head.dtype) == ([FULL, FULL], BRAIN)


def test_an_asynchronous_generator_is_refused(region: Region) -> None:
    with pytest.raises(PolicyError, match="Streams is an asynchronous generator"):
        ruled(Streams(), "fp32")

    class Returns(Streams):
        def forward(self, x: Tensor) -> AsyncIterator[Tensor]:
            return super().forward(x)

    model = Returns()
    with ruled(model, "fp32"), region(), pytest.raises(PolicyError, match="asynchronous generator"):
        model(X)
    assert here() == (False, BRAIN)
