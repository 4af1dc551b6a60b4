"""Conversion of the texts on the command line of `precast tune` to objects.

Invariants: an invalid text is a `ValueError` whose message shows a valid one; an object that a text names is imported
here and nowhere else.
"""

from __future__ import annotations

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
    loaded = load_model(model)
    step_function = None
    if step is not None:
        step_function = _function(step, module, "--step")
    elif loss is not None:
        step_function = _step_of(_function(loss, module, "--loss"), loss)
    form = "MODULE:NAME, such as my_data:batches"
    return {
        "model": loaded,
        "step": step_function,
        "batches": load_named(_full(data, module), "--data", form, callable),
        "optimizer": None if optimizer is None else _optimizer(optimizer),
        "metric": None if metric is None else _function(metric, module, "--metric"),
    }


def tolerance(text: str) -> float:
    """Return a share: `1%` or `0.01`."""
    number, percent, rest = text.partition("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        share = -1.0
    if rest.strip() or not 0 < share < 1:
        raise ValueError(
            f"--tolerance: expected a share between 0 and 1, such as 1% or 0.01, got {text!r}"
        )
    return share


def budget(text: str) -> float:
    """Return seconds: `90`, `90s`, `5m` or `1h`."""
    matched = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([smh]?)\s*", text)
    seconds = float(matched[1]) * _SECONDS[matched[2]] if matched else 0.0
    if seconds <= 0:
        raise ValueError(f"--budget: expected a time above 0, such as 90s, 5m or 1h, got {text!r}")
    return seconds


def _function(
    where: str, module: str, option: str, *, makes_instances: bool = True
) -> Callable[..., Any]:
    """Return the function of that name; or an instance of a class, such as torch.nn:CrossEntropyLoss."""
    form = "MODULE:NAME, such as my_model:my_loss"
    function = load_named(
        _full(where, module), option, form, lambda v: makes_instances and isinstance(v, type)
    )
    if not callable(function):
        raise ValueError(
            f"{option} {where} is of type {type(function).__name__}; it has to be a function"
        )
    return function  # type: ignore[no-any-return]


def _full(where: str, module: str) -> str:
    """Return a name with its module; by default the model's module."""
    return where if ":" in where else f"{module}:{where}"


def _step_of(loss: Callable[..., Any], name: str) -> Callable[[nn.Module, Any], Tensor]:
    """Return a step that runs the model on the input of a pair, and compares its output with the target."""

    def step(model: nn.Module, batch: Any) -> Tensor:
        if not isinstance(batch, list | tuple) or len(batch) != 2:
            count = f" of length {len(batch)}" if isinstance(batch, list | tuple) else ""
            raise PrecastError(
                f"--loss {name} takes the model's output and a target, so each batch of --data has to be a pair "
                f"(input, target); one is of type {type(batch).__name__}{count}. For other batches name a function of "
                "the model and a batch that returns the loss, with --step"
            )
        inputs, target = batch
        return loss(model(inputs), target)  # type: ignore[no-any-return]

    return step


def _optimizer(text: str) -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    """Return a function that makes the optimizer: one of torch.optim with its settings, or a named function."""
    if ":" in text:
        return _function(text, "", "--optimizer", makes_instances=False)
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
    key, equals, value = (part.strip() for part in text.partition("="))
    words = {"true": True, "false": False, "none": None}
    try:
        if not (key.isidentifier() and equals):
            raise ValueError
        is_word = value.lower() in words
        number = int if value.lstrip("+-").isdecimal() else float
        return key, words[value.lower()] if is_word else number(value)
    except ValueError:
        raise ValueError(
            f"--optimizer: {text!r} is not a setting. Write a number, true, false or none, as in lr=0.1; for other "
            "values name a function that makes the optimizer: MODULE:FUNCTION"
        ) from None
