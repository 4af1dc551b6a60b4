"""Modules whose forward is a generator or a coroutine: each of its later steps runs with the module's rule.

Invariants:

- the rule is in force while the body runs, but not between two steps, while the caller runs;
- values sent into and returned from a step are cast like the inputs and outputs of a call;
- a generator is replaced by a generator, a coroutine by a coroutine.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator
from typing import Any

from torch import nn

from precast import _torch
from precast.autocast_mode.decorator import StepRunner, as_coroutine, run_stepwise
from precast.errors import PolicyError

__all__ = ["has_steps", "refuse_async_generator", "run_in_steps", "runs_later"]


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


def run_in_steps(body: Any, run_step: StepRunner, module: nn.Module) -> Any:
    """Return a generator or coroutine that runs each step of `body`, the result of `module`, by `run_step`.

    Raises:
        PolicyError: it is an asynchronous generator.
    """
    if inspect.isasyncgen(body):
        raise _refusal(f"{type(module).__name__} returned")
    return _coroutine(body, run_step) if inspect.iscoroutine(body) else _in_steps(body, run_step)


def _refusal(subject: str) -> PolicyError:
    return PolicyError(
        f"[modules]: {subject} an asynchronous generator, which no rule can follow. Write rules for the modules that "
        "it calls, or make it a generator or a coroutine."
    )


def _forward(module: nn.Module) -> Any:
    """Return a module's forward without its decorators; None for a scripted module without one."""
    return inspect.unwrap(getattr(module, "forward", None))  # type: ignore[arg-type]


async def _coroutine(body: Any, run_step: StepRunner) -> Any:
    return await as_coroutine(_in_steps(body, run_step))


@_torch.runs_uncompiled
def _in_steps(body: Any, run_step: StepRunner) -> Generator[Any, Any, Any]:
    return (yield from run_stepwise(body, run_step))
