"""Modules whose forward is a generator or a coroutine: each of its later steps runs with the module's rule.

Invariants:

- the rule is in force while the body runs, but not between two steps, while the caller runs;
- values sent into and returned from a step are cast like the inputs and outputs of a call;
- a generator is replaced by a generator, a coroutine by a coroutine.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Generator
from typing import Any

from torch import nn

from precast import _torch
from precast.errors import PolicyError

__all__ = ["Step", "has_steps", "in_steps", "refuse_async_generator", "runs_later"]

Step = Callable[[Callable[[Any], Any], Any], Any]
"""Calls a function with one argument while the rule is in force."""


def runs_later(result: object) -> bool:
    """Return True if the body of a module's result has yet to run."""
    return inspect.isgenerator(result) or inspect.iscoroutine(result) or inspect.isasyncgen(result)


def has_steps(module: nn.Module) -> bool:
    """Return True if a module's forward is a generator or a coroutine."""
    forward = _forward(module)
    return inspect.isgeneratorfunction(forward) or inspect.iscoroutinefunction(forward)


def refuse_async_generator(module: nn.Module) -> None:
    """Raise an error for a module whose forward is an asynchronous generator, which no rule can follow.

    Raises:
        PolicyError: it is one.
    """
    if inspect.isasyncgenfunction(_forward(module)):
        raise _refusal(f"the forward of {type(module).__name__} is")


def in_steps(body: Any, step: Step, module: nn.Module) -> Any:
    """Return the generator or coroutine `body`, returned by `module`, with each of its steps run by `step`.

    Raises:
        PolicyError: it is an asynchronous generator.
    """
    if inspect.isgenerator(body):
        return _in_steps(body, step)
    if inspect.iscoroutine(body):
        return _coroutine(body, step)
    raise _refusal(f"{type(module).__name__} returned")


def _refusal(subject: str) -> PolicyError:
    return PolicyError(
        f"[modules]: {subject} an asynchronous generator, which no rule can follow. Write rules for the modules that "
        "it calls, or make it a generator or a coroutine."
    )


def _forward(module: nn.Module) -> Any:
    """Return a module's forward without its decorators; None for a scripted module without one."""
    return inspect.unwrap(getattr(module, "forward", None))  # type: ignore[arg-type]


async def _coroutine(body: Any, step: Step) -> Any:
    return await _awaitable(_in_steps(body, step))


@types.coroutine
def _awaitable(steps: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
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
