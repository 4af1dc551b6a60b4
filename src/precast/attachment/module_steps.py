"""Modules whose forward is a generator or a coroutine: what they run later runs under their rule, step by step.

Invariants:

- a rule is in force while the body runs, and in none of the moments between two steps, in which its caller runs;
- what goes in and comes out at each step is treated as what a call is given and gives;
- the caller gets a generator for a generator, and a coroutine for a coroutine.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Generator
from typing import Any

from torch import nn

from precast import _torch
from precast.errors import PolicyError

__all__ = ["Step", "has_steps", "later", "refuse_async_generator", "runs_later"]

Step = Callable[[Callable[[Any], Any], Any], Any]
"""Calls a function with one argument while the rule is in force."""


def runs_later(result: object) -> bool:
    """Whether what a module returned is yet to run."""
    return inspect.isgenerator(result) or inspect.iscoroutine(result) or inspect.isasyncgen(result)


def _forward(module: nn.Module) -> Any:
    """What a module runs, without what decorators put around it; None for a scripted module that runs nothing."""
    return inspect.unwrap(getattr(module, "forward", None))  # type: ignore[arg-type]


def has_steps(module: nn.Module) -> bool:
    """Whether a module's forward is a generator or a coroutine."""
    forward = _forward(module)
    return inspect.isgeneratorfunction(forward) or inspect.iscoroutinefunction(forward)


def refuse_async_generator(module: nn.Module) -> None:
    """Refuses a module whose forward is an asynchronous generator.

    Raises:
        PolicyError: it is one.
    """
    if inspect.isasyncgenfunction(_forward(module)):
        raise PolicyError(
            f"[modules]: the forward of {type(module).__name__} is an asynchronous generator: no rule can follow it. "
            "Write rules for the modules that it calls, or make it a generator or a coroutine."
        )


def later(body: Any, step: Step, module: nn.Module) -> Any:
    """`body` with each of its steps made by `step`.

    Raises:
        PolicyError: it is an asynchronous generator.
    """
    if inspect.isgenerator(body):
        return _in_steps(body, step)
    if inspect.iscoroutine(body):
        return _coroutine(body, step)
    raise PolicyError(
        f"[modules]: {type(module).__name__} returned an asynchronous generator, which no rule can follow. Write rules "
        "for the modules that it calls, or have it return a generator or a coroutine."
    )


async def _coroutine(body: Any, step: Step) -> Any:
    return await _as_awaitable(_in_steps(body, step))


@types.coroutine
def _as_awaitable(steps: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    return (yield from steps)


@_torch.runs_uncompiled
def _in_steps(body: Any, step: Step) -> Generator[Any, Any, Any]:
    try:
        value = step(body.send, None)
        while True:
            try:
                sent = yield value
            except GeneratorExit:
                step(lambda _: body.close(), None)
                raise
            except BaseException as error:
                value = step(_throw(body, error), None)
            else:
                value = step(body.send, sent)
    except StopIteration as end:
        return end.value


def _throw(body: Any, error: BaseException) -> Callable[[Any], Any]:
    return lambda _: body.throw(error)
