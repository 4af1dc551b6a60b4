"""Regions as decorators: functions, methods, generators, coroutines, and what is refused."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Generator
from typing import Any

import pytest
import torch

import precast
from precast.errors import RegionTypeError


def product_dtype() -> torch.dtype:
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


def test_functions_methods_and_forward() -> None:
    @precast.autocast("cpu", dtype=torch.float16)
    def function(first: int, *, second: int) -> tuple[torch.dtype, int]:
        """Adds."""
        return product_dtype(), first + second

    class Model(torch.nn.Module):
        @precast.autocast("cpu")
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ x

        @staticmethod
        @precast.autocast("cpu")
        def inner_static() -> torch.dtype:
            return product_dtype()

        @precast.autocast("cpu")
        @staticmethod
        def outer_static() -> torch.dtype:
            return product_dtype()

        @precast.autocast("cpu")
        @classmethod
        def of_class(cls) -> tuple[type, torch.dtype]:
            return cls, product_dtype()

    assert function(1, second=2) == (torch.float16, 3)
    assert function.__doc__ == "Adds."
    assert list(inspect.signature(function).parameters) == ["first", "second"]
    assert Model()(torch.ones(2, 2)).dtype is torch.bfloat16
    assert Model().inner_static() is Model().outer_static() is torch.bfloat16
    assert Model().of_class() == (Model, torch.bfloat16)
    assert precast.autocast("cpu")(Model())(torch.ones(2, 2)).dtype is torch.bfloat16


def test_a_decorated_function_takes_the_policy_of_its_caller() -> None:
    @precast.autocast("cpu")
    def product() -> torch.dtype:
        return product_dtype()

    keep = precast.Policy.load("torch").replace(ops={"mm": "fp32"})
    with precast.autocast("cpu", policy=keep):
        assert product() is torch.float32
    assert product() is torch.bfloat16


def test_a_generator_is_in_the_region_only_while_it_runs() -> None:
    @precast.autocast("cpu")
    def steps(n: int) -> Generator[torch.dtype, str, str]:
        got = ""
        for _ in range(n):
            got += yield product_dtype()
        return got

    body = steps(2)
    assert next(body) is torch.bfloat16
    assert product_dtype() is torch.float32
    assert body.send("a") is torch.bfloat16
    with pytest.raises(StopIteration) as end:
        body.send("b")
    assert end.value.value == "ab"


def test_pytorchs_decorator_leaves_a_generators_body_outside() -> None:
    @torch.autocast("cpu")
    def steps() -> Generator[torch.dtype, None, None]:
        yield product_dtype()

    assert list(steps()) == [torch.float32], "the region ended before the body began"


def test_a_generator_can_be_closed_and_thrown_into() -> None:
    seen: list[Any] = []

    @precast.autocast("cpu")
    def steps() -> Generator[int, None, None]:
        try:
            yield 1
        except KeyError:
            seen.append(product_dtype())
            yield 2
        finally:
            seen.append(product_dtype())

    body = steps()
    next(body)
    assert body.throw(KeyError()) == 2
    body.close()
    assert seen == [torch.bfloat16, torch.bfloat16]
    with pytest.raises(KeyError):
        steps().throw(KeyError())
    assert product_dtype() is torch.float32


def test_coroutines_that_take_turns_do_not_see_each_others_regions() -> None:
    async def look(expected: torch.dtype) -> None:
        for _ in range(3):
            assert product_dtype() is expected
            await asyncio.sleep(0)

    lower = precast.autocast("cpu", dtype=torch.float16)(look)

    async def main() -> None:
        await asyncio.gather(lower(torch.float16), look(torch.float32), lower(torch.float16))

    assert inspect.iscoroutinefunction(lower)
    asyncio.run(main())


def test_a_cancelled_coroutine_leaves_nothing_behind() -> None:
    cleaned: list[torch.dtype] = []

    @precast.autocast("cpu")
    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cleaned.append(product_dtype())

    async def main() -> None:
        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert cleaned == [torch.bfloat16]


async def _asynchronous_generator() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize("refused", [3, torch.nn.Linear, _asynchronous_generator])
def test_what_cannot_be_decorated_is_refused(refused: Any) -> None:
    with pytest.raises(RegionTypeError, match="with precast"):
        precast.autocast("cpu")(refused)
