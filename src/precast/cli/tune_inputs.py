"""Conversion of the texts on the command line of `precast tune` to objects.

Invariants: an invalid text is a `ValueError` whose message shows a valid one; an object that a text names is imported
here and nowhere else.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from precast.cli.python_objects import load_model, load_named
from precast.errors import PrecastError

__all__ = ["budget", "inputs", "tolerance"]

_SECONDS: Final = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def inputs(
    *,
    model: str,
    data: str,
    loss: str | None,
    step: str | None,
    optimizer: str | None,
    metric: str | None,
) -> dict[str, Any]:
    """Return the arguments of `precast.tune` that these texts name, by their names, with the metric."""
    module = model.partition(":")[0]
    return {
        "model": load_model(model),
        "step": _step_of(loss, module) if loss is not None else _function(step, module, "--step"),
        "batches": load_named(
            _full(data, module), "--data", "MODULE:NAME, such as my_data:batches", callable
        ),
        "optimizer": None if optimizer is None else _optimizer(optimizer),
        "metric": _function(metric, module, "--metric"),
    }


def tolerance(text: str) -> float:
    """Return a share: `1%` or `0.01`."""
    matched = re.fullmatch(r"\s*(\d*\.?\d+)\s*(%?)\s*", text)
    share = float(matched[1]) / (100 if matched[2] else 1) if matched else 0.0
    if not 0 < share < 1:
        raise ValueError(
            f"--tolerance: expected a share between 0 and 1, such as 1% or 0.01, got {text!r}"
        )
    return share


def budget(text: str) -> float:
    """Return seconds: `90`, `90s`, `5m` or `1h`."""
    matched = re.fullmatch(r"\s*(\d*\.?\d+)\s*([smh]?)\s*", text)
    seconds = float(matched[1]) * _SECONDS[matched[2]] if matched else 0.0
    if seconds <= 0:
        raise ValueError(f"--budget: expected a time above 0, such as 90s, 5m or 1h, got {text!r}")
    return seconds


def _function(where: str | None, module: str, option: str) -> Any:
    """Return the function of that name; or an instance of a class, such as torch.nn:CrossEntropyLoss."""
    if where is None:
        return None
    function = load_named(
        _full(where, module),
        option,
        "MODULE:NAME, such as my_model:my_loss",
        lambda target: isinstance(target, type) and not issubclass(target, Optimizer),
    )
    if not callable(function):
        raise ValueError(
            f"{option} {where} is of type {type(function).__name__}; it has to be a function"
        )
    return function


def _full(where: str, module: str) -> str:
    """Return a name with its module; by default the model's module."""
    return where if ":" in where else f"{module}:{where}"


def _step_of(name: str, module: str) -> Callable[[nn.Module, Any], Tensor]:
    """Return a step that runs the model on the input of a pair, and compares its output with the target."""
    loss = _function(name, module, "--loss")

    def step(model: nn.Module, batch: Any) -> Tensor:
        if not isinstance(batch, list | tuple) or len(batch) != 2:
            raise PrecastError(
                f"--loss {name} takes the model's output and a target, so each batch of --data has to be a pair "
                f"(input, target); one is of type {type(batch).__name__}. For other batches name a function of the "
                "model and a batch that returns the loss, with --step"
            )
        inputs, target = batch
        return loss(model(inputs), target)  # type: ignore[no-any-return]

    return step


def _optimizer(text: str) -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    """Return a function that makes the optimizer: one of torch.optim with its settings, or a named function."""
    if ":" in text:
        return _function(text, "", "--optimizer")  # type: ignore[no-any-return]
    name, *settings = (part.strip() for part in text.split(","))
    kind = getattr(torch.optim, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)) or kind is Optimizer:
        raise ValueError(
            f"--optimizer {name!r} is not in torch.optim; write one with its settings, such as SGD,lr=0.1, or "
            "MODULE:FUNCTION"
        )
    make: Callable[..., Optimizer] = functools.partial(kind, **dict(map(_setting, settings)))
    try:
        make([nn.Parameter(torch.zeros(1))])
    except (TypeError, ValueError) as error:
        raise ValueError(f"--optimizer {text}: {error}") from error
    return make


def _setting(text: str) -> tuple[str, Any]:
    key, _, value = (part.strip() for part in text.partition("="))
    try:
        return key, ast.literal_eval(value.capitalize())  # `true` is Python's True
    except (SyntaxError, ValueError):
        raise ValueError(
            f"--optimizer: {text!r} is not a setting. Write a number, true, false or none, as in lr=0.1; for other "
            "values name a function that makes the optimizer: MODULE:FUNCTION"
        ) from None
