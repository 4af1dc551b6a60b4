"""Regions as decorators of functions, generators and coroutines.

Invariants:

- each call enters the region, so recursion and threads nest as with `with`;
- a generator or coroutine is in the region while its body runs; where it is suspended, its caller is not;
- for other objects the error names an alternative.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Generator
from typing import Any, ParamSpec, TypeVar, cast

import torch

from precast.errors import RegionTypeError

__all__ = ["DecoratorRegion", "StepRunner", "as_coroutine", "region_for_trace", "run_stepwise"]

P = ParamSpec("P")
R = TypeVar("R")
StepRunner = Callable[[Callable[[Any], Any], Any], Any]
"""Calls a function with one argument, in a region or under the rule for a module.

The function runs a generator or coroutine up to its next `yield` or `await`.
"""


class DecoratorRegion:
    """The base of context managers that are also decorators: the decorated function enters them in each call."""

    def __enter__(self) -> Any:
        raise NotImplementedError

    def __exit__(self, *exc_info: object) -> None:
        raise NotImplementedError

    def _region_for_trace(self) -> DecoratorRegion:
        return self

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return a function that runs `function` in this region.

        A generator or coroutine is in the region while its body runs, not where it is suspended.

        Raises:
            RegionTypeError: `function` is not callable, or is a class or an asynchronous generator.
        """
        return _decorate(self, function)


def region_for_trace(region: DecoratorRegion) -> DecoratorRegion:
    """Return an equal region that a traced function can enter; `region` itself cannot become a part of a graph."""
    return region._region_for_trace()


def _decorate(region: DecoratorRegion, function: Callable[P, R]) -> Callable[P, R]:
    if isinstance(function, (staticmethod, classmethod)):
        return cast(Callable[P, R], type(function)(_decorate(region, function.__func__)))
    if not callable(function) or inspect.isclass(function) or inspect.isasyncgenfunction(function):
        kind = (
            "an asynchronous generator" if inspect.isasyncgenfunction(function) else repr(function)
        )
        raise RegionTypeError(
            f"cannot decorate {kind}. Allowed: functions, methods such as forward, generators and coroutines. "
            "For others, enter the region around the calls that need it: `with precast.autocast(...):`"
        )
    wrapper = functools.wraps(function)(_wrapper(region, function))
    vars(wrapper)["__script_unsupported"] = "a function in a precast region cannot be scripted"
    return cast(Callable[P, R], wrapper)


def _wrapper(region: DecoratorRegion, function: Callable[..., Any]) -> Callable[..., Any]:
    def run_step(function: Callable[[Any], Any], value: Any) -> Any:
        with region:
            return function(value)

    if inspect.iscoroutinefunction(function):

        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            return await as_coroutine(run_stepwise(function(*args, **kwargs), run_step))

        return coroutine
    if inspect.isgeneratorfunction(function):

        def generator(*args: Any, **kwargs: Any) -> Any:
            return (yield from run_stepwise(function(*args, **kwargs), run_step))

        return generator

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            with region_for_trace(region):
                return function(*args, **kwargs)
        with region:
            return function(*args, **kwargs)

    return call


@types.coroutine
def as_coroutine(steps: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """Return an awaitable that runs the steps of a coroutine."""
    return (yield from steps)


def run_stepwise(body: Any, run_step: StepRunner) -> Generator[Any, Any, Any]:
    """Run a generator or coroutine. `run_step` runs each of its steps, from one `yield` or `await` to the next."""
    try:
        value = run_step(body.send, None)
        while True:
            try:
                sent_value = yield value
            except GeneratorExit:
                run_step(lambda _: body.close(), None)
                raise
            except BaseException as error:
                value = run_step(functools.partial(_throw, body, error), None)
            else:
                value = run_step(body.send, sent_value)
    except StopIteration as end:
        return end.value


def _throw(body: Any, error: BaseException, _: object) -> Any:
    return body.throw(error)
