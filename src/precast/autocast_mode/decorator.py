"""Regions as decorators: the body of a function, generator or coroutine runs in the region, its caller does not.

Invariants:

- each call enters the region, so recursion and threads nest as with `with`;
- the body of a generator or coroutine is in the region while it runs, not between two steps;
- a decorated object of another kind raises an error with an alternative.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Generator
from typing import Any, ParamSpec, TypeVar, cast

import torch

from precast.errors import RegionTypeError

__all__ = ["DecoratorRegion", "Step", "as_coroutine", "in_steps", "region_for_trace"]

P = ParamSpec("P")
R = TypeVar("R")
Step = Callable[[Callable[[Any], Any], Any], Any]
"""Calls a function with one argument, in a region or while a module's rule is in force."""


class DecoratorRegion:
    """Makes a context manager a decorator that enters it in each call."""

    def __enter__(self) -> Any:
        raise NotImplementedError

    def __exit__(self, *exc_info: object) -> None:
        raise NotImplementedError

    def _region_for_trace(self) -> DecoratorRegion:
        """Return an equal region for a traced function, in whose graph this object cannot be entered."""
        return self

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return `function` with its body in this region.

        The body of a generator or coroutine is in the region only while it runs; its caller is not, between two steps.

        Raises:
            RegionTypeError: `function` is not callable, or is a class or an asynchronous generator.
        """
        return _decorate(self, function)


def region_for_trace(region: DecoratorRegion) -> DecoratorRegion:
    """Return an equal region for a traced function, in whose graph `region` cannot be entered."""
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
            "Otherwise enter the region inside, around the calls that need it: `with precast.autocast(...):`"
        )
    wrapper = functools.wraps(function)(_wrapper(region, function))
    vars(wrapper)["__script_unsupported"] = "a function in a precast region cannot be scripted"
    return cast(Callable[P, R], wrapper)


def _wrapper(region: DecoratorRegion, function: Callable[..., Any]) -> Callable[..., Any]:
    def step(function: Callable[[Any], Any], value: Any) -> Any:
        with region:
            return function(value)

    if inspect.iscoroutinefunction(function):

        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            return await as_coroutine(in_steps(function(*args, **kwargs), step))

        return coroutine
    if inspect.isgeneratorfunction(function):

        def generator(*args: Any, **kwargs: Any) -> Any:
            return (yield from in_steps(function(*args, **kwargs), step))

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
    """Return the steps of a coroutine as an awaitable."""
    return (yield from steps)


def in_steps(body: Any, step: Step) -> Generator[Any, Any, Any]:
    """Run a generator or coroutine with each of its steps run by `step`, and nothing between them."""
    try:
        value = step(body.send, None)
        while True:
            try:
                sent = yield value
            except GeneratorExit:
                step(lambda _: body.close(), None)
                raise
            except BaseException as error:
                value = step(functools.partial(_throw, body, error), None)
            else:
                value = step(body.send, sent)
    except StopIteration as end:
        return end.value


def _throw(body: Any, error: BaseException, _: object) -> Any:
    return body.throw(error)
